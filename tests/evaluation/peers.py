"""The evaluation scripts that others have published, run as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# What a script imports and does not need for its metrics is replaced by a stand-in, and names that NumPy has dropped
# since are given back. A single-precision cast of the script becomes a double-precision one.
_PRELUDE = """
import importlib.abc, importlib.machinery, importlib.util, sys, unittest.mock
import numpy as np
np.in1d = getattr(np, "in1d", np.isin)
np.Inf = np.inf
class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {stand_ins}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = unittest.mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__all__ = [], spec, []
        return module
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, StandIns())
spec = importlib.util.spec_from_file_location("peer", {script!r})
peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer)
given = dict(np.load({folder!r} + "/given.npz"))
result = {{}}
"""


def run_peer(script, code, folder, stand_ins=(), **given):
    """Run code after a published script, in a process of its own, or skip where there is none.

    Args:
        script: Its path in the folder that TFDML_PEERS names.
        code: What to run: `peer` is the script, `given` the arrays; it fills `result`.
        folder: For files.
        stand_ins: Packages that the script imports and the code does not need.
        **given: Arrays.

    Returns:
        `result`, as a dictionary of arrays.
    """
    peers = os.environ.get("TFDML_PEERS")
    if not peers or not (path := Path(peers).resolve() / script).is_file():
        pytest.skip(f"no {script}: set TFDML_PEERS to a folder with the peers' repositories")
    np.savez(folder / "given.npz", **given)
    prelude = _PRELUDE.format(script=str(path), folder=str(folder), stand_ins=set(stand_ins) or "()")
    program = f"{prelude}\n{code}\nnp.savez({str(folder)!r} + '/result.npz', **result)"
    environment = {**os.environ, "PYTHONPATH": str(Path(peers).resolve() / "site")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True)
    if "No module named 'torch'" in done.stderr:
        pytest.skip("PyTorch is not installed, here or in the folder `site` of TFDML_PEERS")
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(folder / "result.npz"))
