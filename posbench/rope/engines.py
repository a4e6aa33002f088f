"""What engines are known to do with the keys of RoPE.

docs/models.md has the same table; a test compares them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

AS_OF = "autumn 2026"  # when their code was read; of these transformers alone was run


class Note(NamedTuple):
    """What engines do where a section has a type, and one of some keys."""

    engines: str
    types: str  # of the section; "" for any
    keys: str  # one of them is given; "" without
    does: str


NOTES = [
    Note("transformers 5.23", "yarn", "attn_factor", "not read"),
    Note("transformers 4.57", "proportional", "", "plain RoPE"),
    Note(
        "vLLM 0.25, SGLang",
        "yarn",
        "attention_factor",
        "not read: YaRN's own instead",
    ),
    Note("vLLM 0.25, SGLang", "yarn", "attn_factor", "times YaRN's own"),
    Note(
        "vLLM 0.25, SGLang",
        "yarn",
        "mscale mscale_all_dim",
        "read in DeepSeek's attention alone; mended by vllm 56446",
    ),
    Note("vLLM 0.25, SGLang", "dynamic longrope", "", "turns by the longest input"),
    Note(
        "llama.cpp",
        "yarn",
        "attention_factor attn_factor mscale mscale_all_dim truncate",
        "not read",
    ),
    Note("llama.cpp", "dynamic", "", "plain RoPE"),
    Note("llama.cpp", "longrope", "", "turns by the longest input"),
]


def notes_on(section: Mapping[str, Any]) -> list[str]:
    """Return a line for each note on a section of RoPE."""
    given = {key for key, value in section.items() if value is not None}
    lines = []
    for note in NOTES:
        keys = [key for key in note.keys.split() if key in given]
        if section.get("rope_type") in note.types.split() and (keys or not note.keys):
            what = ", ".join(keys) or str(section["rope_type"])
            lines.append(f"{note.engines} ({AS_OF}): {what}: {note.does}")
    return lines
