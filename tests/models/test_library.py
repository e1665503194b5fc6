"""Finding models by name, in the store, in models_dir, by path; removing them; files that are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from laya.errors import BadModelFile, DownloadError, InvalidRequest, ModelNotFound, ModelNotPulled
from laya.models import available, is_config_alone, pull, remove, resolve, show
from laya.models.library import Library, model_id_of

from .conftest import FileServer, gguf_bytes


def put(path: Path, size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(size))
    return path


def hf_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model-00001-of-00002.safetensors").write_bytes(bytes(30))
    (path / "model-00002-of-00002.safetensors").write_bytes(bytes(12))
    return path


@pytest.mark.parametrize("name", ["My-Model.Q4_0", "My-Model.Q4_0.gguf", "my-model.q4_0", "MY-MODEL.Q4_0.GGUF"])
def test_resolve_file_in_models_dir_at_once(home: Path, tmp_path: Path, name: str) -> None:
    path = put(tmp_path / "models/My-Model.Q4_0.gguf")
    model = resolve(name)
    assert (model.id, model.path.resolve(), model.origin) == ("My-Model.Q4_0", path, "models_dir")


def test_resolve_exact_file_wins_over_a_pulled_name_in_another_case(home: Path, tmp_path: Path) -> None:
    pull(str(put(tmp_path / "else/tiny.gguf")))
    assert resolve("TINY").origin == "pulled"
    put(tmp_path / "models/TINY.gguf")
    assert [resolve(name).origin for name in ("TINY", "tiny", "Tiny")] == ["models_dir", "pulled", "pulled"]


def test_resolve_exact_case_wins(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "models/Tiny.gguf", 10)
    put(tmp_path / "models/tiny.gguf", 20)
    assert resolve("tiny").file_bytes == 20
    assert resolve("Tiny").file_bytes == 10


def test_available_lists_models_dir_once_each(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "models/one.gguf")
    put(tmp_path / "models/below/two.gguf")
    put(tmp_path / "models/mmproj-one.gguf")
    for number in (1, 2):
        put(tmp_path / f"models/big-0000{number}-of-00002.gguf", 500)
    hf_folder(tmp_path / "models/Folder")
    (tmp_path / "models/empty.gguf").write_bytes(b"")
    (tmp_path / "models/zip.gguf").write_bytes(b"PK\x03\x04etc")
    (tmp_path / "models/short.gguf").write_bytes(b"GG")
    (tmp_path / "models/lacks-00001-of-00002.gguf").write_bytes(gguf_bytes(100))
    models = {model.id: model for model in available()}
    assert set(models) == {"one", "two", "big", "Folder"}
    assert models["big"].file_bytes == 1000
    assert (models["Folder"].format, models["Folder"].file_bytes) == ("hf", 42)


def test_available_without_folders_is_empty(home: Path) -> None:
    assert available() == []
    assert available(models_dir=None) == []


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("empty.gguf", b"", "empty"),
        ("lacks-00001-of-00002.gguf", gguf_bytes(100), "00002-of-00002.gguf: there is no such file"),
    ],
)
def test_resolve_broken_file_names_it_and_what_is_wrong(
    home: Path, tmp_path: Path, name: str, body: bytes, said: str
) -> None:
    path = put(tmp_path / "models" / name)
    path.write_bytes(body)
    for asked in (name, f"models/{name}"):
        with pytest.raises(BadModelFile, match=said):
            resolve(asked)


def test_resolve_paths(home: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "else/where.gguf")
    folder = hf_folder(tmp_path / "else/hf")
    assert resolve("else/where.gguf").path == path
    assert resolve(str(path)).path == path
    assert resolve(str(folder)).format == "hf"
    for number in (1, 2):
        put(tmp_path / f"else/big-0000{number}-of-00002.gguf", 500)
    assert resolve("else/big-00002-of-00002.gguf").path.name == "big-00001-of-00002.gguf"


@pytest.mark.parametrize("name", ["else/none.gguf", "none.gguf", "else", "/"])
def test_resolve_path_without_a_model_says_so(home: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "else").mkdir()
    with pytest.raises((BadModelFile, ModelNotFound)):
        resolve(name)


def test_resolve_never_opens_a_path_for_the_network(home: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "secret.gguf")
    put(tmp_path / "models/tiny.gguf")
    for name in (str(path), "../secret.gguf", "models/../secret.gguf", "models/tiny.gguf", "~/x.gguf"):
        with pytest.raises(ModelNotFound):
            resolve(name, allow_path=False)
    assert resolve("tiny", allow_path=False).id == "tiny"


@pytest.mark.parametrize(
    ("name", "nearest"), [("smolm2", "smollm2"), ("qwen3-8", "qwen3-8b"), ("my-mdel", "my-model"), ("zzz", None)]
)
def test_resolve_unknown_name_tells_the_nearest(home: Path, tmp_path: Path, name: str, nearest: str | None) -> None:
    put(tmp_path / "models/my-model.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert caught.value.details["nearest"] == nearest
    assert (caught.value.http_status, caught.value.exit_code) == (404, 2)


@pytest.mark.parametrize("name", ["qwen3-8b", "QWEN3-8B:Q4_K_M"])
def test_resolve_catalogue_model_that_is_not_here_names_the_command(home: Path, name: str) -> None:
    with pytest.raises(ModelNotPulled, match="laya pull qwen3-8b:q4_k_m"):
        resolve(name)


def test_resolve_source_that_is_not_here_names_the_command(home: Path) -> None:
    with pytest.raises(ModelNotPulled, match="laya pull hf://org/repo:q4_0"):
        resolve("hf://org/repo:q4_0")


def test_pull_path_links_and_does_not_copy(home: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "else/Where.gguf")
    model = pull(str(path))
    assert (model.id, model.path, model.origin) == ("where", path, "pulled")
    assert [found.name for found in home.rglob("*") if found.is_file()] == ["manifest.json"]
    assert resolve("where").path == path
    assert pull(str(path)) == model
    assert remove("where") == 0
    assert path.exists()


def test_pull_path_of_a_folder_and_a_chosen_name(home: Path, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "else/HF Model")
    assert pull(str(folder)).id == "hf-model"
    assert pull(str(put(tmp_path / "x.gguf")), model_id="Mine").id == "mine"


def test_pull_path_that_is_no_model_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04etc")
    with pytest.raises(BadModelFile, match="not a GGUF"):
        pull(str(tmp_path / "x.zip"))
    assert list(home.rglob("*.json")) == []


def test_resolve_linked_model_that_went_away_says_so(home: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "else/where.gguf")
    pull(str(path))
    path.unlink()
    with pytest.raises(BadModelFile, match=r"where\.gguf: there is no such file"):
        resolve("where")
    assert available() == []
    assert remove("where") == 0


@pytest.mark.parametrize(
    ("name", "said"), [("org/repo", "hf://org/repo"), ("smolm2", "smollm2"), ("./none.gguf", "does not exist")]
)
def test_pull_unknown_name_tells_the_nearest(home: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFound, match=said):
        pull(name)


@pytest.mark.parametrize("source", ["ftp://host/x.gguf", "ollama://llama3"])
def test_pull_unknown_scheme_names_those_there_are(home: Path, source: str) -> None:
    with pytest.raises(DownloadError, match="pypi://"):
        pull(source)


def test_pulled_file_cut_short_is_found_out_and_pulled_again(home: Path, server: FileServer, tmp_path: Path) -> None:
    url = server.serve("/tiny.gguf", gguf_bytes())
    model = pull(url)
    model.path.write_bytes(gguf_bytes(1000))
    with pytest.raises(BadModelFile, match="300000 were pulled"):
        resolve("tiny")
    assert pull(url).path.read_bytes() == gguf_bytes()
    assert resolve("tiny").file_bytes == 300_000
    assert list((home / "partial").iterdir()) == []


def test_remove_frees_what_was_pulled(home: Path, server: FileServer) -> None:
    pull(server.serve("/tiny.gguf", gguf_bytes()))
    assert remove("tiny") == 300_000
    assert [path for path in home.rglob("*") if path.is_file()] == []
    with pytest.raises(ModelNotFound):
        remove("tiny")


def test_remove_takes_pulled_models_only(home: Path, tmp_path: Path) -> None:
    path = put(tmp_path / "models/tiny.gguf")
    for name in ("tiny", str(path), "qwen3-8b", "../models"):
        with pytest.raises(ModelNotFound):
            remove(name)
    assert path.exists()


def test_damaged_manifest_is_no_model_and_hides_no_other(home: Path, tmp_path: Path) -> None:
    pull(str(put(tmp_path / "a.gguf")))
    pull(str(put(tmp_path / "b.gguf")))
    (Library().folder("a") / "manifest.json").write_text("{")
    assert [model.id for model in available()] == ["b"]
    assert pull(str(tmp_path / "a.gguf")).id == "a"
    assert [model.id for model in available()] == ["a", "b"]


def test_pulled_wins_over_models_dir(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "models/tiny.gguf", 100)
    pull(str(put(tmp_path / "else/tiny.gguf", 200)))
    assert resolve("tiny").file_bytes == 200
    assert [(model.id, model.file_bytes) for model in available()] == [("tiny", 200)]


def test_show_knows_what_was_written_and_what_the_catalogue_says(home: Path, tmp_path: Path) -> None:
    card = show("llama-3.3-70b")
    assert card.file is None
    assert card.entry is not None
    assert card.entry.shape.n_layer == 80
    pull(str(put(tmp_path / "a.gguf")))
    card = show("A")
    assert card.manifest is not None
    assert card.manifest.linked == str(tmp_path / "a.gguf")
    assert card.entry is None


@pytest.mark.parametrize(
    ("text", "model_id"),
    [("My Model (v2).Q4_K_M", "my-model-v2-.q4_k_m"), ("../../etc", "etc"), ("a/b:c", "a-b:c"), ("Ünï", "n")],
)
def test_model_id_of_is_plain(text: str, model_id: str) -> None:
    assert model_id_of(text) == model_id


def test_model_id_of_nothing_is_refused() -> None:
    with pytest.raises(DownloadError):
        model_id_of("///")


@pytest.mark.parametrize("name", ["nonsense", "empty", "loop", "folder"])
def test_name_of_what_lies_here_is_the_path_it_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nonsense").write_text("no model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    said = []
    for word in (name, f"./{name}"):
        try:
            said.append(str(resolve(word, home=home).path))
        except BadModelFile as error:
            said.append(error.message)
    assert said[0] == said[1]
    assert name in said[0]
    with pytest.raises(ModelNotFound):
        resolve(name, home=home, allow_path=False)


def test_model_of_the_catalogue_comes_before_a_file_of_its_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_text("no model")
    with pytest.raises(ModelNotPulled):
        resolve("smollm2", home=home)


@pytest.mark.parametrize("name", ["", " "])
def test_empty_name_is_said_to_be_empty(home: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name is empty"):
        resolve(name, home=home)


def test_folder_with_a_config_alone_can_be_planned_and_not_served(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert is_config_alone(tmp_path)
    with pytest.raises(BadModelFile, match=r"`laya plan .*config\.json`, not served"):
        resolve(str(tmp_path), home=home)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert not is_config_alone(tmp_path)
