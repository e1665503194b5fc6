#!/bin/sh
# The `llm` command with a model that Laya serves. pip install llm; LAYA_URL and LAYA_MODEL say where and what.
# What is registered here stays registered: afterwards `llm -m laya/MODEL ...` works in every terminal.
set -eu
url=${LAYA_URL:-http://127.0.0.1:8000}
model=${LAYA_MODEL:-smollm2}
models=$(dirname "$(llm logs path)")/extra-openai-models.yaml
if ! grep -qs "model_id: \"laya/$model\"" "$models"; then
  cat >> "$models" <<END
- model_id: "laya/$model"
  model_name: "$model"
  api_base: "$url/v1"
  api_key_name: laya
END
fi
llm keys set laya --value "${LAYA_API_KEY:-none}"
echo "Apples fall down." | llm -m "laya/$model" -o max_tokens 48 -o temperature 0 -s "Say why, in one sentence."
