"""Exported folders in transformers 4, in an environment of its own: the run's logits, or an error that says why not.

python -m venv ENV && ENV/bin/pip install torch transformers==4.57.6 safetensors numpy
POSBENCH_TRANSFORMERS4=ENV/bin/python python -m pytest tests/slow/test_transformers4.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import EXACT, configured, written

from posbench.config.schema import Config
from posbench.data import tokenizer as tokenizers
from posbench.huggingface import export
from posbench.run_folder.folder import load_config
from posbench.run_folder.trained import model_of

PYTHON = os.environ.get("POSBENCH_TRANSFORMERS4", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="POSBENCH_TRANSFORMERS4 names no Python with transformers 4"),
]
SCRIPT = """
import json, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file, save_file
assert transformers.__version__.startswith("4."), transformers.__version__
failed = {}
for folder in sorted(Path(sys.argv[1]).glob("out-*")):
    config = json.loads((folder / "config.json").read_text())
    longer = {"max_seq_len": 96} if config["model_type"] == "mpt" else {}
    given, found = load_file(folder / "given.safetensors"), {}
    for name, ids in given.items():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **longer).eval()
        except KeyError as error:
            failed[folder.name] = str(error)
            break
        if name == "generated":  # greedily, from the first 20 tokens, with the folder's own settings
            new = ids.shape[1] - 20
            found[name] = model.generate(ids[:, :20], max_new_tokens=new, min_new_tokens=new, do_sample=False)
        else:
            with torch.no_grad():
                found[name] = model(ids).logits
    save_file(found, folder / "found.safetensors")
print(json.dumps(failed))
"""


@torch.inference_mode()
def test_version_4_has_the_runs_logits_or_refuses(tiny_config: Config, tmp_path: Path) -> None:
    wanted: dict[str, dict[str, torch.Tensor]] = {}
    for number, (encoding, block, _) in enumerate(EXACT):
        run = written(tmp_path / str(number), configured(tiny_config, encoding, block))
        folder = tmp_path / f"out-{number:02}"
        export.export(run, folder)
        model = model_of(run, load_config(run), tokenizers.raw_bytes())
        ends = model.encoding.max_length
        stream = torch.Generator().manual_seed(number)
        given = {str(n): torch.randint(256, (1, n), generator=stream) for n in (1, 24, 96) if not ends or n <= ends}
        wanted[folder.name] = {name: model(ids) for name, ids in given.items()}
        if not ends:
            ids = given["24"][:, :20]
            for _ in range(20):
                # The separator, at which generation would end, is not taken.
                ids = torch.cat((ids, model(ids)[:, -1:, :256].argmax(-1)), dim=1)
            given["generated"] = wanted[folder.name]["generated"] = ids
        save_file(given, folder / "given.safetensors")
    done = subprocess.run([PYTHON, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    refused = json.loads(done.stdout.splitlines()[-1])
    for name, values in wanted.items():
        parameters = json.loads((tmp_path / name / "config.json").read_text()).get("rope_parameters", {})
        proportional = parameters.get("rope_type") == "proportional"
        assert refused.get(name) == ("'proportional'" if proportional else None), name
        if proportional:
            assert "does not know the `rope_type`" in (tmp_path / name / "README.md").read_text()
            continue
        found = load_file(tmp_path / name / "found.safetensors")
        for kind, value in values.items():
            limit = 0 if kind == "generated" else 1e-5 * value.abs().max()
            assert (found[kind] - value).abs().max() <= limit, (name, EXACT[int(name[4:])][0], kind)
