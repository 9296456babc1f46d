"""A folder that stands for a model without weights: its config and a tokenizer.

The tokenizer stands in for the model's own: bytes for what is put in, a number for every other
token that may come out. Loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pw.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_folder(config: Path, out: Path, overrides: Mapping[str, Any]) -> None:
    """Write the folder that stands for a model: its config and a tokenizer.

    Args:
        config: A config.json; a tokenizer beside it is taken along.
        out: Folder to make, or to fill again.
        overrides: Keys of the (text) config to change, like `num_hidden_layers`.

    Raises:
        ConfigError: The file is no config, or has no such key.
    """
    settings = _overridden(config, overrides)
    out.mkdir(parents=True, exist_ok=True)
    text = settings.get("text_config", settings)
    if (config.parent / _TOKENIZER_FILES[0]).is_file():
        for name in _TOKENIZER_FILES:
            if (config.parent / name).is_file():
                shutil.copyfile(config.parent / name, out / name)
    else:
        _write_tokenizer(int(text["vocab_size"]), out)
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _overridden(config: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(config.read_text("utf-8"))
        text: dict[str, Any] = settings.get("text_config", settings)
        text["vocab_size"] = int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a model config with a vocab_size: `{config}`") from error
    if unknown := sorted(set(overrides) - set(text)):
        raise ConfigError(f"the config has no `{unknown[0]}` to override: `{config}`")
    text.update(overrides)
    layers = text.get("num_hidden_layers")
    if "num_hidden_layers" in overrides and "layer_types" in text:
        text["layer_types"] = text["layer_types"][-int(layers or 0) :]
    return settings


def _write_tokenizer(vocabulary: int, out: Path) -> None:
    """A tokenizer with so many tokens: the bytes, then ` 256`, ` 257`, ... that only come out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"Ġ{number}" for number in range(len(alphabet), vocabulary))]
    table = {token: number for number, token in enumerate(tokens[:vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / _TOKENIZER_FILES[0]))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT}
    (out / _TOKENIZER_FILES[1]).write_text(json.dumps(settings) + "\n", "utf-8")
