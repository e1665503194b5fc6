"""What is said of a count is what the numbers say, at any number of experts, in words, files and picture."""

from __future__ import annotations

import csv
import io

import pytest

from laya.experts.counting import Counted, TopicCounts
from laya.experts.heat_map import draw, png
from laya.experts.use import ExpertUse


def use_of(**topics: dict[int, list[int]]) -> ExpertUse:
    """Two experts a token."""
    counts = [
        TopicCounts(topic=name, n_tokens=sum(layers[min(layers)]) // 2, n_windows=1, layers=layers)
        for name, layers in topics.items()
    ]
    n_experts = len(next(iter(counts[0].layers.values())))
    return ExpertUse(Counted(n_experts=n_experts, top_k=2, window_tokens=512, topics=counts))


def test_even_is_10_to_15_percent_of_8_experts() -> None:
    use = use_of(text={0: [1000, 1500] * 4, 1: [1250] * 8})
    assert use.is_even
    assert (
        use.verdict() == "Even: every expert of every layer gets 10 % to 15 %; 10-15 % (0.8 to 1.2 of the fair share)."
    )


def test_worst_layer_and_dead_experts_are_named() -> None:
    use = use_of(text={0: [1250] * 8, 3: [0, 0, 2000, 1600, 1600, 1600, 1600, 1600]})
    assert not use.is_even
    assert use.verdict() == (
        "Uneven: 8 of 16 experts (all layers) are outside 10-15 % (0.8 to 1.2 of the fair share). "
        "Worst is layer 3: expert 2 gets 20 %, expert 0 0 % (MaxVio 0.60). 2 are dead on this text, in layer 3."
    )


def test_band_follows_the_number_of_experts_and_few_tokens_are_told() -> None:
    use = use_of(text={0: [10] * 64})
    assert use.is_even
    assert "gets 1.56 % to 1.56 %; 1.25-1.88 % (0.8 to 1.2" in use.verdict()
    assert "The text is short: chance alone moves a share by about 31.4 % of itself." in use.verdict()
    assert use.chance == pytest.approx(((1 - 1 / 64) / 10) ** 0.5)


def test_specialists_are_those_a_topic_uses_more_than_the_others() -> None:
    use = use_of(c={0: [400, 200, 200, 200]}, prose={0: [200, 200, 200, 4400]})
    c, prose = use.counted.topics
    assert [(one.layer, one.expert) for one in use.specialists(c)] == [(0, 0), (0, 1), (0, 2)]
    assert use.specialists(c)[0].lift == pytest.approx(0.4 / ((0.4 + 0.04) / 2))
    assert [(one.expert, one.share) for one in use.specialists(prose)] == [(3, 0.88)], "each topic counts the same"
    assert use_of(c={0: [400, 200]}).specialists(use.counted.topics[0]) == []


def test_csv_has_every_share_of_every_topic() -> None:
    use = use_of(a={0: [1, 3], 2: [2, 2]}, b={0: [4, 0], 2: [1, 3]})
    rows = list(csv.DictReader(io.StringIO(use.as_csv())))
    assert len(rows) == (1 + 2) * 2 * 2
    assert rows[0] == {"topic": "(all)", "layer": "0", "expert": "0", "assignments": "5", "share": "0.625000"}
    assert rows[-1] == {"topic": "b", "layer": "2", "expert": "1", "assignments": "3", "share": "0.750000"}


def test_json_has_the_measures_of_each_layer_and_topic() -> None:
    fields = use_of(a={0: [1, 3, 0, 0]}, b={0: [2, 2, 2, 2]}).as_json()
    assert fields["n_tokens"] == 6 and fields["band"] == [0.2, 0.3] and not fields["is_even"]
    of_a = fields["topics"][0]["layers"][0]
    assert of_a["share"] == [0.25, 0.75, 0, 0] and of_a["max_vio"] == 2 and of_a["dead"] == [2, 3]
    assert of_a["assignments"] == [1, 3, 0, 0] and fields["layers"][0]["dead"] == []


def test_heat_map_has_a_panel_for_each_topic_and_a_cell_for_each_expert() -> None:
    use = use_of(a={0: [1, 3], 2: [2, 2]}, b={0: [4, 0], 2: [1, 3]}, c={0: [2, 2], 2: [2, 2]})
    figure = draw(use, "title")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == [f"{name} tokens)" for name in ("(all) (6", "a (2", "b (2", "c (2")]
    assert [axes.images[0].get_array().shape for axes in panels] == [(2, 2)] * 4
    assert panels[1].images[0].get_array().tolist() == [[0.5, 1.5], [1, 1]], "of the fair share"
    assert [text.get_text() for text in panels[2].texts] == ["100.0", "0.0", "25.0", "75.0"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["0", "2"]
    assert png(figure).startswith(b"\x89PNG\r\n\x1a\n")


def test_heat_map_of_many_experts_and_layers_is_drawn_without_numbers() -> None:
    figure = draw(use_of(text={layer: list(range(64)) for layer in range(48)}), "title")
    assert figure.axes[0].images[0].get_array().shape == (48, 64) and not figure.axes[0].texts
    assert png(figure).startswith(b"\x89PNG")
