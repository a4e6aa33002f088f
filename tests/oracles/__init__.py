"""Independent implementations of the schemes, which import nothing of posbench: one
class per scheme, with its name.

A class calls an implementation that none of us wrote (transformers, x-transformers,
fla-core). If there is none, it has the paper's equation in plain loops.
`test_oracles.py` compares its values and gradients with ours. The class is a namespace
and never instantiated; a module with the scheme's name will do, too. It holds:

    CASES: list[dict]     option sets to compare, [{}] for the defaults alone; a value
                          may be a function of the shape; the contract tests run over
                          the same sets
    def reference(
        parameters, shape, options, q, k, v, x, positions, layer, causal
    ) -> dict[str, Tensor]
                          called by name: it may list those that it reads, and take
                          the others as **others

`parameters` are the scheme's own by name, randomised; `options` are complete; q, k, v
are raw, (B, H, T, Dh); x is the layer's normalised input (B, T, D), whose first
`token_dim` channels are the token embeddings; positions (1|B, T) are below the training
length. `reference` returns one or more of these, differentiable, in fp32 or fp64:

        "positions"      (1|B, T)       what `positions` returns, for encodings that
                                        look at the texts of tokens
        "embedded"       (B, T, D)      what `embed` returns
        "q", "k"         (B, H, T, Dq)  what `rotate` returns
        "bias"           broadcastable to (B, H, T, T), added to the scaled logits;
                         compared up to a constant per row
        "probabilities"  (B, H, T, T)   attention weights (0 where hidden)
        "output"         (B, H, T, Dh)  of the attention layer

Optional names, with their default values:

    DTYPE = torch.float32
        float64: inputs and parameters are handed over in fp64 (ours stays fp32)
    CAUSAL = (True, False)
        which masks it can compare
    POSITIONS = ("consecutive", "offset", "gaps", "far")
        of `schemes.positions_of`; "fractional" where it is named
    VOCABULARY = ()
        texts of tokens; `reference` is then given `ids` (B, T), too
    TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
        wider only with a reason beside it
    def parameter_count(shape, options) -> int
        learned parameters; none
    def reads_positions(options) -> bool
        whether position numbers matter, or only the tokens' order; True
    PARTLY_UNUSED = "..."
        which parameters a short causal input leaves without gradient; none
    GRAPH_BREAKS = "..."
        why torch.compile cannot take the scheme in one graph; it must

Third-party packages are imported inside functions, through `third_party`: a missing one
skips the comparison on a developer's machine and fails it where
POSBENCH_REQUIRE_ORACLES=1 (`make test` sets it).
"""

import importlib
import importlib.util
import os
import pathlib
import pkgutil
import types

import pytest


def of(name: str) -> type | types.ModuleType | None:
    """Return the oracle of a scheme; None if there is none."""
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"oracles.{each.name}")
        scheme = vars(module).get(name)
        if isinstance(scheme, type):
            return scheme
        if each.name == name and hasattr(module, "reference"):
            return module
    return None


def third_party(module: str) -> types.ModuleType:
    """Import a module of another project, or skip (fail under
    POSBENCH_REQUIRE_ORACLES=1) if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        _missing(f"{module}: {error}")
        raise


def third_party_file(package: str, path: str) -> types.ModuleType:
    """Load one file of an installed package, such as ops/path_attn/naive.py of fla,
    which wants triton at import.
    """
    package_spec = importlib.util.find_spec(package)
    if package_spec is None or package_spec.origin is None:
        _missing(package)
        raise ImportError(package)
    file = pathlib.Path(package_spec.origin).parent / path
    name = f"oracle_{package}_{file.parent.name}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _missing(what: str) -> None:
    if os.environ.get("POSBENCH_REQUIRE_ORACLES") == "1":
        pytest.fail(
            f"POSBENCH_REQUIRE_ORACLES=1, but an oracle is not installed: {what}"
        )
    pytest.skip(f"oracle not installed: {what}", allow_module_level=True)
