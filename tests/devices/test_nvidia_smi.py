"""The driver's tool, faked: rows of it, and none where it is missing, fails or says nothing."""

import os

from echo_hooks.devices.nvidia_smi import query_gpus


def tool(directory, monkeypatch, body: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_a_row_for_each_gpu(tmp_path, monkeypatch):
    tool(
        tmp_path, monkeypatch, 'test "$1" = --query-gpu=index,name && echo "0, NVIDIA H200" && echo && echo "1, Other"'
    )
    assert query_gpus("index", "name") == [["0", "NVIDIA H200"], ["1", "Other"]]


def test_none_where_it_fails_or_is_missing(tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, "echo 'no devices were found'; exit 6")
    assert query_gpus("name") == []
    monkeypatch.setenv("PATH", "")
    assert query_gpus("name") == []
