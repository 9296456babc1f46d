import threading
from pathlib import Path

import pytest

from pw.config import QuantizeConfig
from pw.errors import PartialResultError
from pw.store.writer import ArtifactWriter
from pw_pipelines import quantize
from pw_pipelines.behind import Behind
from support.offline import QUIET, calibration, random_checkpoint, tree_digests


def test_so_many_jobs_are_unfinished_and_no_more() -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def job() -> None:
        begun.release()
        assert may_end.wait(60)

    with Behind(2) as behind:
        behind.do(job)
        behind.do(job)
        for _ in range(2):
            assert begun.acquire(timeout=60)  # both run, and this thread does, too
        third = threading.Thread(target=behind.do, args=(job,))
        third.start()
        assert not begun.acquire(timeout=0.2)
        may_end.set()
        third.join(60)
        assert not third.is_alive()
    assert begun.acquire(timeout=0)  # leaving waits for it


def test_without_threads_a_job_is_done_at_once() -> None:
    seen = []
    behind = Behind(0)
    behind.do(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.main_thread()]


def fail() -> None:
    raise OSError("disk")


def ends(behind: Behind) -> None:
    with behind:
        behind.do(fail)


def test_a_failure_comes_out_where_the_caller_asks_next() -> None:
    one = Behind(1)
    one.do(fail)
    with pytest.raises(OSError, match="disk"):
        one.do(lambda: None)
    one.do(fail)
    with pytest.raises(OSError, match="disk"):
        one.finish()
    with pytest.raises(OSError, match="disk"):
        ends(one)


def stopped(done: list[int]) -> None:
    with Behind(2) as behind:
        behind.do(fail)
        behind.do(lambda: done.append(1))
        raise KeyboardInterrupt


def test_the_callers_own_error_is_the_one_that_counts() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        stopped(done)
    assert done == [1]


def test_files_written_behind_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path / "model")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path, nsamples=40))
    threads = set()
    write = ArtifactWriter.write_blocks

    def watched(self: ArtifactWriter, *args: object) -> None:
        threads.add(threading.current_thread())
        write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ArtifactWriter, "write_blocks", watched)
    reports = {}
    for jobs in (0, 2):
        monkeypatch.setitem(quantize._JOBS_BEHIND, "cpu", jobs)
        out = tmp_path / f"{jobs}.pw"
        reports[jobs] = quantize.run(str(tmp_path / "model"), out, config, QUIET, device="cpu")
        assert (threading.main_thread() in threads) == (jobs == 0)
        threads.clear()
    assert tree_digests(tmp_path / "0.pw") == tree_digests(tmp_path / "2.pw")
    assert reports[0].costs.bytes_read == reports[2].costs.bytes_read


def test_a_full_disk_behind_stops_the_run_and_the_folder_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(tmp_path / "model")
    config = QuantizeConfig(max_bits=4, calibration=calibration(tmp_path, nsamples=40))
    monkeypatch.setitem(quantize._JOBS_BEHIND, "cpu", 2)
    write, calls = ArtifactWriter.write_blocks, []

    def full(self: ArtifactWriter, layer: int, *args: object) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise PartialResultError("disk is full")
        write(self, layer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ArtifactWriter, "write_blocks", full)
    model, out = str(tmp_path / "model"), tmp_path / "a.pw"
    with pytest.raises(PartialResultError, match="disk is full"):
        quantize.run(model, out, config, QUIET, device="cpu")
    assert not out.exists()
    monkeypatch.setattr(ArtifactWriter, "write_blocks", write)
    quantize.run(model, out, config, QUIET, device="cpu")
    quantize.run(model, tmp_path / "b.pw", config, QUIET, device="cpu")
    assert tree_digests(out) == tree_digests(tmp_path / "b.pw")
