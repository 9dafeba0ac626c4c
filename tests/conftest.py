"""What every test may rely on: the process's environment is as it was before the test before it."""

import os

import pytest


@pytest.fixture(autouse=True)
def _environment_stays():
    # A traced rank sets RANK and its kin for its whole process; here that process runs the next test too.
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
