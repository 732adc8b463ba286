"""``naflex-fast run``: a script runs as Python itself would run it, with timm patched."""

import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train_with_timms_loader

from timm_naflex_fast import status
from timm_naflex_fast.cli import run as launcher
from timm_naflex_fast.cli.main import main

TRAINING = str(Path(train_with_timms_loader.__file__))


@pytest.fixture
def undone(monkeypatch):
    """What running a script changes in a process, put back afterwards."""
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    prepare = launcher.multiprocessing.spawn.get_preparation_data
    monkeypatch.setattr(launcher.multiprocessing.spawn, "get_preparation_data", prepare)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)


@pytest.fixture
def run(undone, tmp_path):
    def run(source, *arguments, before=()):
        script = tmp_path / "script.py"
        script.write_text(source)
        return main(["run", *before, str(script), *arguments])

    return run


def command(*arguments, launch=("-m", "timm_naflex_fast", "run"), **options):
    root = str(Path(launcher.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launch, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_script_is_main(run, tmp_path, capfd):
    source = """
import pickle, sys
count: int = 0
class Here: pass
print(sys.argv[1:], sys.path[0], __name__, __file__, __spec__, __package__)
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Here()))) is Here)
print(isinstance(__builtins__, type(sys)), __annotations__)
"""
    assert run(source, "--mode", "mine", "--", "-h") == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        f"['--mode', 'mine', '--', '-h'] {tmp_path} __main__ {tmp_path / 'script.py'} None None",
        "True True",
        "True {'count': <class 'int'>}",
    ]
    assert status().flags.pos_embed == "matmul"
    assert re.fullmatch(
        r"naflex-fast: pos_embed=matmul, patch_embed=matmul, rope=batched; timm \S+, \d+ functions of NaFlexEmbeds.*\n",
        err,
    )


def test_modes_flags_and_the_environment(run, monkeypatch, capfd):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "interpolate-cached")
    assert run("", before=["--rope", "stock"]) == 0
    assert status().flags.as_dict() == dict(pos_embed="interpolate_cached", patch_embed="matmul", rope="stock")
    assert run("", before=["--mode", "grid-sample"]) == 0
    assert status().flags.pos_embed == "grid_sample"
    monkeypatch.setenv("RANK", "1")
    capfd.readouterr()
    assert run("") == 0 and capfd.readouterr().err == ""


def test_what_is_wrong_is_one_line_and_changes_nothing(run, monkeypatch, capfd):
    assert run("", before=["--mode", "fast"]) == 2
    assert main(["run", "no_such_script.py"]) == 2
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "fast")
    assert run("") == 2
    lines = capfd.readouterr().err.splitlines()
    assert "mode='fast' is not a strategy; valid: 'stock'" in lines[0] and len(lines) == 3
    assert "cannot read the script 'no_such_script.py': No such file or directory" in lines[1]
    assert "TIMM_NAFLEX_FAST_MODE='fast' is not a strategy" in lines[2]
    assert status().flags.is_stock


def test_the_scripts_exit_status_is_its_own(run):
    with pytest.raises(SystemExit) as end:
        run("import sys; sys.exit(7)")
    assert end.value.code == 7
    with pytest.raises(SystemExit) as end:
        run("raise SystemExit('for a reason')")
    assert end.value.code == "for a reason"


@pytest.mark.parametrize("error", ["ValueError('mine')", "OSError('mine')", "KeyboardInterrupt"])
def test_an_error_shows_the_scripts_frames_alone(run, error, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what))
    with pytest.raises((ValueError, OSError, KeyboardInterrupt)):
        run(f"def f(): raise {error}\nf()")
    ((_, raised, frames),) = shown
    names = []
    while frames:
        names.append(frames.tb_frame.f_code.co_filename)
        frames = frames.tb_next
    assert names == [str(tmp_path / "script.py")] * 2
    sys.excepthook(type(raised), raised, None)  # what Python calls when the error arrives at the top
    assert len(shown) == 1


def test_a_module_by_name(undone, tmp_path, monkeypatch, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "tool.py").write_text("import sys; print(__name__, __spec__.name, sys.argv, sys.path[0])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-m", "package.tool", "-m", "x"]) == 0
    argv = [str(tmp_path / "package" / "tool.py"), "-m", "x"]
    assert capfd.readouterr().out == f"__main__ package.tool {argv} {tmp_path}\n"


def test_patching_waits_for_the_import(undone, tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    sys.meta_path.insert(0, launcher.AfterImport("late_module", lambda: seen.append(sys.modules["late_module"].value)))
    assert seen == []
    import late_module

    assert seen == [late_module.value] and not any(isinstance(f, launcher.AfterImport) for f in sys.meta_path)
    assert "exec_module" not in vars(late_module.__loader__)


def test_spawned_processes_are_told(undone, capfd):
    launcher.patch_on_import(launcher.parse_flags("interpolate_cached"), launcher.Said())
    capfd.readouterr()
    data = launcher.multiprocessing.spawn.get_preparation_data("child")
    told = pickle.dumps(data["timm_naflex_fast"])
    launcher.enable("stock")
    assert status().flags.is_stock
    pickle.loads(told)
    assert status().flags.pos_embed == "interpolate_cached" and capfd.readouterr().err == ""


LIGHT = """
import signal, sys
from multiprocessing import get_context
def child(queue):
    queue.put([type(finder).__name__ for finder in sys.meta_path][:1])
if __name__ == "__main__":
    queue = get_context("spawn").Queue()
    process = get_context("spawn").Process(target=child, args=(queue,))
    process.start()
    print(queue.get(), "timm" in sys.modules, flush=True)
    process.join()
    signal.sigwait([signal.SIGUSR1]) if len(sys.argv) > 1 else 1 / 0
"""


@pytest.mark.slow
def test_ctrl_c_and_spawned_processes(tmp_path):
    script = tmp_path / "light.py"
    script.write_text(LIGHT)
    process = command(script, "wait")
    assert process.stdout.readline() == "['AfterImport'] False\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n") or "timm was not imported" in err
    assert "launcher.py" not in err and "light.py" in err


@pytest.mark.slow
def test_training_with_timms_loader_on_two_processes():
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m timm_naflex_fast run".split()
    out, err = command("--mode", "matmul", TRAINING, "--mode", "fork", "--workers", "1", launch=launch).communicate()
    ranks = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert [line.split()[:3] for line in ranks] == [
        ["rank", "0:", "timm_naflex_fast.patching.timm"],
        ["rank", "1:", "timm_naflex_fast.patching.timm"],
    ], err
    assert ranks[0].split()[3] == ranks[1].split()[3] and len(ranks[0].split()) > 4  # the same weights
    assert err.count("naflex-fast: pos_embed=matmul") == 1
