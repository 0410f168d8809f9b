"""A folder of results is one command's: locked while it writes, and without what earlier ones left."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import kvtwin
from sim.errors import UserError
from sim.files import write_atomically
from sim.run import folders
from sim.run.folders import LOCK_FILE, clear, owning, renewing, settle

SMALL = ["--workload", "fixed", "--num-prompts", "5", "--input-len", "20", "--output-len", "3", "--gpu", "l20"]
TABLES = ("requests.csv", "requests.parquet")


def small(command, folder, *words):
    return [command, *SMALL, "--out", str(folder), "--quiet", *words]


def files(folder):
    """Names below a folder, with one name for the table of either kind."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {str(Path(name).parent / "requests") if Path(name).name in TABLES else name for name in found}


def names(folder):
    """What a folder holds itself."""
    return sorted(path.name for path in folder.iterdir())


def num_open():
    """Descriptors that this process has open."""
    return len(names(Path("/dev/fd")))


HOLD = "import sys, time; from pathlib import Path; from sim.run.folders import owning\n"
HOLD += "with owning(Path(sys.argv[1])): print(flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path):
    """A process that owns `tmp_path / "out"`."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_folder_that_another_writes_to_is_refused_and_left_alone(tmp_path, capsys, other, command):
    out = tmp_path / "out"
    (out / "result.json").write_text("the other's")
    assert kvtwin.main(small(command, out, "--policy", "vllm-recompute")) == 2
    assert "another command writes into" in capsys.readouterr().err
    assert (out / "result.json").read_text() == "the other's"


def test_a_killed_process_leaves_no_lock(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / "out" / LOCK_FILE).exists()
    assert kvtwin.main(small("run", tmp_path / "out")) == 0
    assert LOCK_FILE not in files(tmp_path / "out")


def test_a_lock_in_the_same_process_is_taken_once_and_given_back(tmp_path):
    with owning(tmp_path), owning(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_replaces_a_comparison_whole(tmp_path):
    policies = ["--policy", "vllm-recompute", "--policy", "layerkv:slo-aware=false", "--timeline"]
    assert kvtwin.main(small("compare", tmp_path, *policies)) == 0
    assert {"comparison.json", "vllm-recompute/result.json", "figures/memory.png"} < files(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "vllm-recompute" / "notes.txt").write_text("mine too")
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "result.json").write_text("another folder's")
    assert kvtwin.main(small("run", tmp_path)) == 0
    kept = {"notes.txt", "vllm-recompute/notes.txt", "before/result.json"}
    assert files(tmp_path) == kept | {"result.json", "requests", "scenario.toml"}


def test_a_comparison_replaces_another_and_a_run(tmp_path):
    assert kvtwin.main(small("compare", tmp_path, "--policy", "vllm-recompute", "--no-figures")) == 0
    assert kvtwin.main(small("run", tmp_path, "--timeline")) == 0
    (tmp_path / "report.html").write_text("of the run")
    assert kvtwin.main(small("compare", tmp_path, "--policy", "vllm-swap", "--no-figures")) == 0
    found = files(tmp_path)
    assert not {"result.json", "requests", "timeline.json.gz", "report.html", "vllm-recompute/result.json"} & found
    assert {"comparison.md", "vllm-swap/result.json"} < found


def contents(folder):
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


class KilledError(BaseException):
    """Stands for SIGKILL: nothing is tidied behind it."""


def test_a_command_killed_at_any_step_leaves_old_results_or_new_ones(tmp_path, monkeypatch):
    """Each change of the file system in turn is the last that is made; the next reader makes up for the rest."""
    seen = set()
    for step in range(60):
        folder = tmp_path / str(step)
        with renewing(folder, below=["a", "b"]) as new:
            for name in ("comparison.json", "a/result.json", "b/result.json", "figures/lanes.png"):
                (new.place / name).parent.mkdir(exist_ok=True)
                (new.place / name).write_bytes(b"old")
        old, left = contents(folder), [step]

        def counted(do, left=left):
            def act(*words, **named):
                left[0] -= 1
                if left[0] < 0:
                    raise KilledError
                return do(*words, **named)

            return act

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "rmdir", "mkdir", "write_text"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            patch.setattr("shutil.rmtree", counted(shutil.rmtree))
            with suppress(KilledError), renewing(folder, below=["b", "c"]) as new:
                for name in ("comparison.json", "b/result.json", "c/result.json"):
                    (new.place / name).parent.mkdir(exist_ok=True)
                    (new.place / name).write_bytes(b"new")
        settle(folder)
        with owning(folder):
            pass
        new_ones = dict.fromkeys(("comparison.json", "b/result.json", "c/result.json"), b"new")
        assert contents(folder) in (old, new_ones), step
        seen.add(contents(folder) == old)
        if left[0] > 0:
            assert step > 15
            break
    assert seen == {True, False}


def test_what_stands_in_the_way_is_told_before_anything_changes(tmp_path):
    with renewing(tmp_path) as new:
        (new.place / "result.json").write_bytes(b"old")
    (tmp_path / "figures").write_bytes(b"mine")
    with pytest.raises(UserError, match="a file where a folder goes"), renewing(tmp_path) as new:
        (new.place / "figures").mkdir()
        for name in ("result.json", "figures/lanes.png"):
            (new.place / name).write_bytes(b"new")
    assert contents(tmp_path) == {"result.json": b"old", "figures": b"mine"}


@pytest.mark.parametrize("where", ["out/vllm-v1", "out/vllm-v1/live-1", "."])
def test_folders_above_and_below_one_that_is_written_to_are_refused(tmp_path, capsys, other, where):
    assert kvtwin.main(small("run", tmp_path / where)) == 2
    assert "another command writes into" in capsys.readouterr().err


def test_a_folder_in_the_same_process_is_another_threads(tmp_path):
    with owning(tmp_path), ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="another command"):
        pool.submit(owning(tmp_path / "below").__enter__).result()


@pytest.mark.parametrize("command", ["run", "compare"])
def test_what_is_refused_leaves_the_old_results(tmp_path, capsys, command):
    figures = ["--no-figures"] if command == "compare" else []
    assert kvtwin.main(small(command, tmp_path, "--policy", "vllm-recompute", *figures)) == 0
    before = contents(tmp_path)
    assert kvtwin.main(small(command, tmp_path, "--policy", "layerkv", "--gpu-memory-utilization", "0.01")) == 2
    assert capsys.readouterr().err
    assert contents(tmp_path) == before


def test_every_file_that_commands_write_is_known(tmp_path):
    """Else it would stay beside another's."""
    run, compare = tmp_path / "run", tmp_path / "compare"
    assert kvtwin.main(small("run", run, "--timeline", "--figures", "--replicas", "2")) == 0
    assert kvtwin.main(["report", str(run)]) == 0
    assert kvtwin.main(small("compare", compare, "--policy", "vllm-recompute", "--policy", "layerkv")) == 0
    for folder in (run, compare):
        with owning(folder):
            assert files(folder) > {LOCK_FILE, "scenario.toml"}
            clear(folder)
        assert list(folder.rglob("*")) == []


def test_names_that_leave_the_folder_are_not_followed(tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "result.json").write_text("not of this folder")
    with owning(tmp_path / "out"):
        (tmp_path / "out" / LOCK_FILE).write_text(f"../else\n{tmp_path / 'else'}\n")
        clear(tmp_path / "out")
    assert (tmp_path / "else" / "result.json").exists()


def test_a_circle_of_symbolic_links_is_told(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert kvtwin.main(small("run", tmp_path / "loop")) == 2
    assert (
        capsys.readouterr().err
        == f"kvtwin: {tmp_path / 'loop'}: its symbolic links lead in a circle; name another place\n"
    )
    with pytest.raises(UserError, match="in a circle"):
        write_atomically(tmp_path / "loop", lambda file: file.write(b"x"))
    assert (tmp_path / "loop").is_symlink()


def test_what_a_link_names_is_replaced_and_not_the_link(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in (b"new", b"newer"):
        write_atomically(tmp_path / "link", lambda file, text=text: file.write(text))
        assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    def full(file):
        Path("/dev/full").write_bytes(b"x")

    with pytest.raises(OSError, match=r"No space left on device: '.*/page\.html'"):
        write_atomically(tmp_path / "page.html", full)
    assert list(tmp_path.iterdir()) == []


def test_devices_and_pipes_are_written_through(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        write_atomically(tmp_path / "pipe", lambda file: file.write(b"through"))
        assert reader.communicate()[0] == b"through"
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(OSError, match="No space left"):
        write_atomically(Path("/dev/full"), lambda file: file.write(b"x"))
    assert Path("/dev/full").is_char_device()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with (
        pytest.raises(UserError, match=r"--out: cannot write into .* \(Permission denied\); check its rights"),
        owning(tmp_path),
    ):
        pass


def test_a_lock_that_cannot_be_opened_is_told(tmp_path):
    """A link is not followed: what it names is no lock."""
    (tmp_path / LOCK_FILE).symlink_to("else")
    with pytest.raises(UserError) as caught, owning(tmp_path, "--to"):
        pytest.fail("it is owned")
    reason = os.strerror(errno.ELOOP)
    assert str(caught.value) == f"--to: cannot write into {tmp_path} ({reason}); check its rights, or name another"
    assert names(tmp_path) == [LOCK_FILE] and not (tmp_path / "else").exists()


def test_a_lock_whose_file_went_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """By what held it before: that is closed, and the file that is there is the one that is locked."""
    opened = []

    def slow(lock, folder, flag):
        if not opened:
            (folder / LOCK_FILE).unlink()
        opened.append(lock)

    monkeypatch.setattr(folders, "_lock", slow)
    before = num_open()
    with owning(tmp_path):
        assert len(opened) == 2 and os.path.samestat(os.fstat(opened[1]), (tmp_path / LOCK_FILE).stat())
        assert num_open() == before + 1
    assert num_open() == before and names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_where_nothing_can_be_locked_a_warning_is_told(tmp_path, monkeypatch, capsys, number):
    def refused(lock, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    before = num_open()
    if number == errno.EIO:
        with pytest.raises(UserError, match=r"cannot write into .* \(Input/output error\)"), owning(tmp_path):
            pytest.fail("it is owned")
        told = ""
    else:
        with owning(tmp_path):
            assert names(tmp_path) == [LOCK_FILE]
        told = f"kvtwin: warning: {tmp_path} cannot be locked ({os.strerror(number)}): write no other results\n"
    assert capsys.readouterr() == ("", told)
    assert num_open() == before


@pytest.mark.parametrize("pyarrow", [True, False])
def test_a_full_disk_is_told_with_the_folder_and_leaves_no_part(tmp_path, pyarrow):
    """A limit of file sizes stands for the disk: the same error reaches the same calls."""
    code = "import sys, kvtwin, sim.run.files, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "" if pyarrow else "sim.run.files.find_spec = lambda name: None\n"
    code += "sys.exit(kvtwin.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *small("run", tmp_path, "--num-prompts", "20000")]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"kvtwin: --out: cannot write into {tmp_path} (")
    assert done.stderr.count("\n") == 1 and "too large" in done.stderr and "make room" in done.stderr
    assert not list(tmp_path.glob("*.part")) and LOCK_FILE not in files(tmp_path)


STUDY = 'workload = "fixed"\nnum-prompts = 5\ngoodput = ["ttft:3000"]\npolicy = ["vllm-v1", "vllm-recompute"]\n'
DERIVE = ["profile", "derive", "--gpu", "l20", "--sibling", "l40s-imported", "--reason", "a test"]


@pytest.mark.parametrize("words", [["sweep", "s.toml"], ["tune", "s.toml"], ["map", "s.toml"], DERIVE])
def test_what_makes_many_files_is_refused_where_another_command_writes(tmp_path, monkeypatch, capsys, other, words):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(f"{STUDY}[{words[0]}]\n")
    assert kvtwin.main([*words, "--out", "out"]) == 2
    assert "another command writes into out" in capsys.readouterr().err
    assert files(tmp_path / "out") == {LOCK_FILE}
