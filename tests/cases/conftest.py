"""Cases run in a directory of their own, with the sources under test and without the developer's own job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent
ROOT = CASES.parent.parent
SOURCES = [ROOT, ROOT / "launchers", ROOT / "integrations/megatron", ROOT / "integrations/deepspeed"]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The temporary directory that commands run in."""
    directory = tmp_path_factory.mktemp("case")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE", "PYTHONSAFEPATH"):
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, SOURCES)))
        patch.setattr(sys, "path", [*map(str, SOURCES), *sys.path])
        patch.chdir(directory)
        patch.setattr("echo_launch.world.local_accelerators", list)
        yield directory
