"""``naflex-fast run``: Python itself runs the script, and timm is patched in all of the script's
processes."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from shutil import copytree

import digits
import pytest
import torch
from safetensors.torch import load_file

import timm_naflex_fast
from tests.support.checks import slow
from tests.support.oracles import embed, small_vit
from timm_naflex_fast import disable, status
from timm_naflex_fast.cli import run as launcher
from timm_naflex_fast.cli.main import main
from timm_naflex_fast.patching.choices import Settings

RUN = ["-m", "timm_naflex_fast", "run"]
TORCHRUN = "--standalone --nproc-per-node 2"
NOT_IMPORTED = "naflex-fast: timm.models.naflexvit was not imported, so nothing was patched\n"
SCRIPT = """
import pickle, sys
count: int = 0
class Here: pass
print(sys.argv, sys.path, sys.flags.optimize, sys.warnoptions, sys._xoptions)
print(__name__, __file__ if "__file__" in globals() else None, __spec__ and __spec__.name, __package__)
print(sys.modules["__main__"].__dict__ is globals(), type(pickle.loads(pickle.dumps(Here()))) is Here)
print(isinstance(__builtins__, type(sys)), __annotations__)
sys.exit(7)
"""
FLAGS = "import sys; print(sys.stdout.write_through, sys.flags.interactive)"
CHILDREN = """
import json, os, subprocess, sys
from multiprocessing import get_context

def look(_=None):
    flags = json.loads(os.environ["TIMM_NAFLEX_FAST_RUN"])
    return type(sys.meta_path[0]).__name__, flags["flags"]["pos_embed"], flags["first"], "torch" in sys.modules

if __name__ == "__main__":
    print(look())
    for method in ("spawn", "forkserver", "fork"):
        with get_context(method).Pool(1) as pool:
            print(pool.apply(look))
    from joblib import Parallel, delayed
    print(Parallel(n_jobs=2)(delayed(look)() for _ in range(2))[0])
    code = "import children; print(children.look())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    for python in (sys.executable, sys.argv[1]):
        said = subprocess.run([python, "-c", "import sitecustomize as s; print(s.mine)"], capture_output=True)
        print(said.stdout + said.stderr)
"""
PARENT = """
import importlib, subprocess, sys
from multiprocessing import get_context

if __name__ == "__main__":
    name = "timm.models.naflexvit"
    if sys.argv[1] == "subprocess":
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
    else:
        process = get_context(sys.argv[1]).Process(target=importlib.import_module, args=(name,))
        process.start(), process.join()
"""
SIGLIP2 = """
import torch, transformers
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings
config = transformers.Siglip2VisionConfig(hidden_size=32, patch_size=4, num_patches=16)
Siglip2VisionEmbeddings(config)(torch.randn(1, 8, 48), torch.tensor([[2, 4]]))
"""


def run(*arguments, launch=RUN, env=(), given="", cwd=None, redirect=""):
    """Exit status, stdout and stderr."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "TIMM_NAFLEX_FAST_MODE")
    }
    environment |= {"OMP_NUM_THREADS": "1", **dict(env)}
    command = ["sh", "-c", f'exec "$0" "$@" {redirect}', sys.executable, *launch, *arguments]
    options = dict(capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)
    done = subprocess.run(command, input=given, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "script", "given", "status"),
    [
        ("-O -Werror::FutureWarning -Xmine=3 -Xno_debug_ranges", "app.zip", "", 7),
        ("-O", "-m package.tool", "", 7),
        ("", "fails.py", "", 1),
        ("-u -i", "flags.py", "import sys\nsys.exit(3)\n", 3),
    ],
)
def test_a_script_runs_as_python_runs_it(options, script, given, status, tmp_path):
    texts = {
        "package/__init__.py": "",
        "package/tool.py": SCRIPT,
        "fails.py": SCRIPT.replace("sys.exit(7)", "fails()"),
    }
    texts["flags.py"] = FLAGS
    (tmp_path / "package").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
    command = [*script.split(), "--", "-h", "--mode", "mine", "--"]
    code, out, err = run(*command, launch=options.split(), cwd=tmp_path, given=given)
    assert code == status
    assert out.count("\n") == {7: 4, 1: 4, 3: 1}.get(status, 0)
    ours = run(
        "--rope", "stock", *command, launch=[*options.split(), *RUN], cwd=tmp_path, given=given
    )
    assert ours == (code, out, err + NOT_IMPORTED)


@pytest.mark.parametrize("words", ["no_such_script.py", "no_such_folder/train.py --lr 1"])
def test_a_script_that_is_missing_is_named_and_nothing_starts(words):
    code, out, err = run(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"there is no file {words.split()[0]}, and no command of that name" in err


@pytest.mark.parametrize("how", ["subprocess", slow("spawn"), "fork"])
def test_a_library_that_only_a_child_imports_is_not_missed(how, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    code, _, err = run(str(script), how, env={"TMPDIR": str(tmp_path)})
    said = "processes that this one started imported timm.models.naflexvit, and were patched"
    assert (code, err) == (0, f"naflex-fast: {said}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parent.py"]


@pytest.mark.parametrize(
    ("script", "redirect"),
    [
        ("print(1)", "2>&-"),
        ("import sys; print(1); sys.stderr = None", ""),
        ("import nothing", "2>&-"),
    ],
)
def test_without_stderr_nothing_is_said(script, redirect):
    assert run("-", given=script, redirect=redirect)[1:] == ("1\n" * ("1" in script), "")
    assert run("--mode", "fast", "-", redirect="2>&-") == (2, "", "")


def test_every_kind_of_process_is_prepared_and_one_speaks(tmp_path):
    """The user's own ``sitecustomize`` runs, in an interpreter that cannot import this package
    too."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("mine = 'chained'")
    venv.create(tmp_path / "bare")
    env = {"PYTHONPATH": str(tmp_path / "site")}
    bare = str(tmp_path / "bare" / "bin" / "python")
    code, out, err = run("--mode", "grid-sample", "children.py", bare, cwd=tmp_path, env=env)
    lines = ["('ImportHookFinder', 'grid_sample', False, False)"] * 6 + [r"b'chained\n'"] * 2
    assert (code, out.splitlines(), err) == (0, lines, NOT_IMPORTED)
    (tmp_path / "site" / "sitecustomize.py").write_text("import missing_module")
    assert "missing_module" in run("-", cwd=tmp_path, env=env)[2]
    code, _, err = run("-", launch=["-I", *RUN])  # a Python that ignores the environment is refused
    assert code == 2
    assert "-E, -I and -S" in err
    assert err.count("\n") == 1


def test_the_script_is_patched_by_the_copy_that_runs_it_or_does_not_run(tmp_path):
    copytree(Path(timm_naflex_fast.__file__).parent, tmp_path / "copy" / "timm_naflex_fast")
    script = str(tmp_path / "script.py")
    Path(script).write_text("import timm_naflex_fast; print(timm_naflex_fast.__file__)")
    code, out, _ = run(script, cwd=tmp_path / "copy")
    assert (code, out.strip()) == (0, str(tmp_path / "copy" / "timm_naflex_fast" / "__init__.py"))
    # A module beside the script is for the script alone.
    (tmp_path / "wrapt.py").write_text("raise ImportError('none')")
    code, out, err = run(script, env={"PYTHONPATH": str(tmp_path)})
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is not prepared: none" in err


def test_a_command_that_is_written_in_python_is_found_and_another_is_named(tmp_path):
    for name, first in (
        ("long", f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''"),
        ("shell", "#!/bin/sh"),
    ):
        (tmp_path / name).write_text(f"{first}\nprint('ran')")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert run("long", env=env)[:2] == (0, "ran\n")
    code, out, err = run("shell", env=env)
    assert (code, out, err.count("\n")) == (
        2,
        "",
        1,
    )
    assert "valid: naflex-fast run before the Python command" in err


@pytest.mark.slow
def test_transformers_is_patched():
    pytest.importorskip("transformers", minversion="5.21")
    code, _, err = run("--library", "transformers", "-", given=SIGLIP2)
    assert code == 0 and re.search(
        r"transformers \S+, 4 functions replaced; .* pos_embed by matmul 1 times", err
    ), err


@pytest.fixture
def executed(monkeypatch):
    """What ``run`` would start: (command, environment)."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call[1:]))
    for name in ("TIMM_NAFLEX_FAST_MODE", "RANK", launcher.ENV_NAME):
        monkeypatch.delenv(name, raising=False)
    launcher.prepare_process()  # without its variable it prepares nothing
    assert status().flags == Settings()
    yield calls
    disable()


def test_modes_and_flags_and_who_speaks(executed, monkeypatch, capfd):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "interpolate-cached")
    main(["run", "--rope", "stock", "-"])
    main(["run", "--mode", "grid-sample", "--strict", "-"])
    at_exit = []
    monkeypatch.setattr(launcher.atexit, "register", lambda *call: at_exit.append(call))

    def end(order, process=0, work=bool):
        """Do what ``sitecustomize`` does, here, where timm is imported already; what is said at the
        end."""
        monkeypatch.setenv(launcher.ENV_NAME, order)
        launcher.prepare_process()
        report, wanted, own = at_exit.pop()
        work()
        report(wanted, own + process)
        return capfd.readouterr().err

    (first, second) = (environment[launcher.ENV_NAME] for _, environment in executed)
    assert end(second).startswith("naflex-fast: Settings(pos_embed='grid_sample', ")
    assert status().flags.strict
    monkeypatch.setenv("RANK", "1")
    line = r"naflex-fast \(rank 1\): .*'interpolate_cached', .*rope='stock'\); timm .* replaced; .*none of them\n"
    # a fork says nothing
    assert re.fullmatch(line, end(first))
    assert end(first, process=1) == ""
    assert status().flags == Settings("interpolate_cached", "matmul", "stock")
    assert not status().flags.strict
    below = os.environ[launcher.ENV_NAME]
    assert end(below) == ""  # nor does a process below in which nothing ran
    monkeypatch.delenv("RANK")
    line = r"naflex-fast \(process \d+\): .*pos_embed by interpolate_cached 1 times\n"
    assert re.fullmatch(line, end(below, work=lambda: embed(small_vit())))


@pytest.mark.parametrize(
    ("words", "mode", "message"),
    [
        ("--mode fast", "", "'fast' is not valid for mode; valid: 'stock'"),
        ("", "fast", "'fast' is not valid for TIMM_NAFLEX_FAST_MODE"),
        (
            "--library transformers --mode grid-sample",
            "",
            "not valid for mode with transformers; valid: ",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_starts_nothing(
    words, mode, message, executed, monkeypatch, capfd
):
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", mode)
    assert main(["run", *words.split(), "script.py"]) == 2
    assert not executed
    assert status().flags == Settings()
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "words", "others"),
    [
        (RUN, f"torchrun {TORCHRUN}", 1),  # torchrun's own process speaks too
        (
            f"-m torch.distributed.run {TORCHRUN} -m timm_naflex_fast run".split(),
            "--mode matmul",
            0,
        ),
    ],
)
def test_torchrun_trains_the_digits_like_one_process(launch, words, others, children, tmp_path):
    weights = []
    script = str(Path(digits.__file__).with_name("train_digits.py"))
    for start, before in ([], []), (launch, words.split()):
        out = tmp_path / f"{len(start)}.safetensors"
        code, _, err = run(
            *before, script, "--mode", "stock", "--steps", "3", "--out", str(out), launch=start
        )
        assert code == 0, err
        weights.append(load_file(out))
    assert json.loads(out.with_suffix(".json").read_text())["processes"] == 2
    said = re.findall(
        r"^naflex-fast \(rank (\d)\): .*='matmul', .* ran .*pos_embed by matmul \d+ times",
        err,
        re.M,
    )
    assert sorted(said) == ["0", "1"] and err.count("naflex-fast:") == others, err
    assert [ran["pos_embed", "matmul"] > 0 == ran["pos_embed", "stock"] for ran in children()] == [
        True,
        True,
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-4)
