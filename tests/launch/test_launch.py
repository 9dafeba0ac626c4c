"""A whole simulation with a fake tracer behind the real fork server: files, order, output and exit status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from echo_hooks.errors import EchoError, PlanError
from echo_hooks.graph.rundir import read_run
from echo_launch.main import Outcome, main


def launch(script: dict, *words: str, finish=None) -> int:
    Path("job.py").write_text(json.dumps(script))
    before = set(psutil.Process().children(recursive=True))
    try:
        return main(["--simulate", *words, "job.py", "--lr", "1"], tracer="fake_tracer", finish=finish or fine)
    finally:
        assert set(psutil.Process().children(recursive=True)) <= before, "processes are left"


def fine(_run, _launch) -> Outcome:
    return Outcome([], lambda console: console.print("the report"), lambda: '{"step_time_ms": 1.0}\n')


PIPELINE = {"layout": {"tp": 2, "pp": 4}}


def test_a_pipeline_run(capfd):
    assert launch(PIPELINE, "--world-size", "8", "--out", "run") == 0
    run = read_run("run")
    manifest = run.manifest
    assert (manifest["script"], manifest["args"], manifest["world_size"]) == ("job.py", ["--lr", "1"], 8)
    assert manifest["cluster"] == "h100-sxm:1x8" and "no --cluster" in manifest["assumptions"][0]
    assert manifest["complete"] is True and manifest["versions"]["python"] == sys.version.split()[0]
    assert set(manifest["traced_because"]) == {str(rank) for rank in manifest["traced_ranks"]}
    assert {0, 2, 4, 7} <= set(manifest["traced_ranks"])
    assert [role.ranks for role in run.roles] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    out, err = capfd.readouterr()
    assert "hello from rank 0" in out and "the report" in out
    assert "hello from rank 7" not in out + err
    assert Path("run/logs/00007.log").read_text() == "hello from rank 7\n"
    assert not Path("run/logs/00000.log").exists()
    assert "traced rank 0 in" in err and "left" in err


def test_json_keeps_stdout_for_the_report(capfd):
    assert launch(PIPELINE, "--world-size", "8", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"step_time_ms": 1.0}
    assert "hello from rank 0" in err


def test_quiet_says_nothing_but_the_report(capfd):
    assert launch(PIPELINE, "--world-size", "8", "--quiet", "--out", "run") == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("the report\n", "")
    assert Path("run/logs/00000.log").read_text() == "hello from rank 0\n"


def test_runs_are_numbered_and_same_input_gives_the_same_files():
    for _ in range(2):
        assert launch(PIPELINE, "--world-size", "8") == 0
    names = sorted(os.listdir("echo-runs"))
    assert names == ["job-001", "job-002"]
    for name in ("roles.json", "groups.parquet", "ranks/00000.ops.parquet"):
        assert Path("echo-runs/job-001", name).read_bytes() == Path("echo-runs/job-002", name).read_bytes()


def test_local_synchronisation_on_disk():
    layout = {"tp": 2, "pp": 2, "local_sync": True}
    assert launch({"layout": layout}, "--world-size", "8", "--out", "run", "--jobs", "4") == 0
    run = read_run("run")
    assert [role.ranks for role in run.roles] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(trace.groups.groups == run.groups.groups for trace in run.traces.values())


def test_the_child_sees_the_scripts_world(capfd):
    assert launch({"everyone": "show"}, "--world-size", "2") == 0
    shown = json.loads(next(line for line in capfd.readouterr().out.splitlines() if line.startswith("{")))
    assert shown == {"args": ["--lr", "1"], "devices": "", "path": os.getcwd()}


# ---- exit status ----


@pytest.mark.parametrize(
    "kind, status", [("hang", 3), ("mismatch", 3), ("out_of_memory", 3), ("layout", 3), ("warning", 0)]
)
def test_problems_decide_the_status(kind, status):
    def finish(_run, _launch):
        return Outcome([(kind, "a problem")], lambda console: None, lambda: "{}")

    assert launch({}, "--world-size", "2", "--out", "run", finish=finish) == status
    assert read_run("run").world_size == 2  # the run is whole: it can be composed for another cluster


def test_a_plan_error_is_status_3(capfd):
    def finish(_run, _launch):
        raise PlanError("ranks 0-1 wait for each other")

    assert launch({}, "--world-size", "2", finish=finish) == 3
    assert "echo-launch: ranks 0-1 wait for each other\n" in capfd.readouterr().err


def test_the_scripts_own_error(capfd):
    assert launch({"everyone": "raise"}, "--world-size", "8", "--out", "run") == 1
    err = capfd.readouterr().err
    assert "Traceback: line 3\nValueError: bad luck\necho-launch: rank 0: ValueError: bad luck\n" in err
    assert not Path("run").exists()  # it held nothing of worth


def test_a_later_ranks_error_keeps_its_log_but_is_no_run(capfd):
    script = {**PIPELINE, "behaviour": {"4": "raise"}}
    assert launch(script, "--world-size", "8", "--out", "run", "--jobs", "1") == 1
    err = capfd.readouterr().err
    assert "rank 4: ValueError" in err and "unfinished" in err
    assert Path("run/logs/00004.log").read_text() == "hello from rank 4\n"
    with pytest.raises(EchoError, match="no manifest"):
        read_run("run")


def test_an_empty_directory_of_the_users_own_is_left_to_him():
    Path("run").mkdir()
    assert launch({"everyone": "raise"}, "--world-size", "8", "--out", "run") == 1
    assert os.listdir("run") == []


def test_a_killed_rank(capfd):
    script = {"behaviour": {"7": "kill"}}
    assert launch(script, "--world-size", "8", "--jobs", "1") == 1
    err = capfd.readouterr().err
    assert "rank 7: the process was ended by SIGKILL (out of host memory?)" in err
    assert "last words" in err


def test_a_rank_that_leaves_python(capfd):
    assert launch({"everyone": "exit"}, "--world-size", "8") == 1
    assert "rank 0: the process left Python by itself with status 7" in capfd.readouterr().err


def test_an_error_of_echos_own_says_so(capfd):
    assert launch({"everyone": "internal"}, "--world-size", "8") == 1
    err = capfd.readouterr().err
    assert "rank 0: Echo itself failed: RuntimeError: an error of Echo's own" in err and "Traceback (most" in err


def test_no_step_at_all_is_no_success(capfd):
    assert launch({"everyone": "no step"}, "--world-size", "8") == 1
    assert "rank 0: the script ended after 0 optimizer step(s)" in capfd.readouterr().err


def test_one_rank_without_a_step_is_a_plan_problem_when_that_explains_it(capfd):
    script = {"behaviour": {"7": "no step"}}

    def finish(_run, _launch):
        return Outcome([("hang", "rank 7 left")], lambda console: None, lambda: "{}")

    assert launch(script, "--world-size", "8", finish=finish) == 3
    assert launch(script, "--world-size", "8") == 1
    assert "rank 7: the script ended" in capfd.readouterr().err


def test_a_server_that_cannot_get_ready(capfd):
    assert launch({"prepare": "cluster x: unknown"}, "--world-size", "8") == 2
    assert "echo-launch: cluster x: unknown\n" in capfd.readouterr().err
    assert not Path("echo-runs").exists()


def test_bad_arguments(capfd):
    assert main(["--simulate", "missing.py"]) == 2
    assert capfd.readouterr().err.startswith("echo-launch: missing.py: no such file")


def test_help(capfd):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--trace-ranks" in capfd.readouterr().out


def test_without_simulate_it_is_torchrun_with_the_same_arguments(monkeypatch):
    Path("train.py").write_text("")
    called = []
    monkeypatch.setattr(os, "execv", lambda program, words: called.append((program, words)) or sys.exit(0))
    words = ["--nnodes=1", "--nproc_per_node", "2", "train.py", "--lr", "1"]
    with pytest.raises(SystemExit):
        main(words)
    ((program, command),) = called
    assert program == sys.executable and command[1:4] == ["-P", "-m", "echo_launch.torchrun"]
    assert command[5:] == words


def test_a_full_disk_is_one_sentence(monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device", "groups.parquet")

    monkeypatch.setattr("echo_launch.main.write_groups", full)
    assert launch({}, "--world-size", "2") == 2
    assert "echo-launch: groups.parquet: No space left on device\n" in capfd.readouterr().err


# ---- directories ----


def test_directories_that_are_taken(capfd):
    assert launch(PIPELINE, "--world-size", "8", "--out", "run") == 0
    assert launch(PIPELINE, "--world-size", "8", "--out", "run") == 2
    assert "--out" in (err := capfd.readouterr().err) and "holds a run already" in err
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("x")
    assert launch(PIPELINE, "--world-size", "8", "--out", "notes") == 2
    assert launch(PIPELINE, "--world-size", "8", "--out", "job.py") == 2
    assert os.listdir("notes") == ["mine.txt"]


def test_odd_script_names_give_usable_directories():
    Path("my train!.py").write_text("{}")
    assert main(["--simulate", "--world-size", "2", "my train!.py"], tracer="fake_tracer", finish=fine) == 0
    assert os.listdir("echo-runs") == ["my-train--001"]


# ---- order ----


def test_a_rank_that_came_too_early_is_traced_again():
    # Stage 2 (rank 4) needs stage 1 (rank 2), which runs at the same moment: the second attempt succeeds.
    script = {**PIPELINE, "slow": 0.1, "behaviour": {"4": "after 2"}}
    assert launch(script, "--world-size", "8", "--out", "run", "--jobs", "2") == 0


def test_a_rank_is_traced_again_once_its_donor_is_known():
    script = {"layout": {"asks": {"0": 7}}}
    assert launch(script, "--world-size", "8", "--out", "run") == 0
    assert read_run("run").manifest["traced_twice"] == [0]
    assert read_run("run").manifest["made_up_values"] == {"broadcast of int64 from rank 7": 1}


def test_the_scripts_helpers_end_with_their_rank():
    assert launch({"everyone": "leave helpers"}, "--world-size", "8") == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]
