import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.cluster.chain import COMPLETE, CONTINUE, STOP, Chain, begin_chain
from candle_p1.cluster.submission import run_here
from candle_p1.records.record import RECORD_NAME

FAILED = {"status": "failed", "failure": {"reason": "planted", "rank": None}}
KILLED = {"status": "failed", "failure": {"reason": "rank 1 died", "rank": 1}}
INTERRUPTED = {"status": "interrupted", "failure": {"reason": "SIGUSR1", "rank": 0}}


@pytest.fixture
def write(tmp_path):
    """Writes the lines of a chain of three jobs and, if there is one, the record of its run."""

    def write(lines, found=None):
        begin_chain(tmp_path, 3)
        with (tmp_path / "job.chain").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        if found is not None:
            (tmp_path / RECORD_NAME).write_text(json.dumps(found))
        return Chain.read(tmp_path)

    return write


@given(st.lists(st.text(max_size=12) | st.sampled_from(["begun", "ended 2", "jobs 3"])))
def test_no_text_is_an_error(tmp_path_factory, lines):
    directory = tmp_path_factory.mktemp("chain")
    (directory / "job.chain").write_text("\n".join(lines))
    chain = Chain.read(directory)
    assert chain.decide()[0] in (CONTINUE, STOP)
    assert chain.has_jobs_left in (True, False)


@pytest.mark.parametrize(
    ("lines", "found", "expected", "left"),
    [
        ([], None, CONTINUE, True),
        (["begun", "ended 138"], INTERRUPTED, CONTINUE, True),
        (["begun", "ended 138"] * 3, INTERRUPTED, CONTINUE, False),
        (["begun"], {"status": "running"}, CONTINUE, True),  # its node was lost
        (["begun", "ended 2"], KILLED, STOP, False),  # one rank had the user's error
        (["begun", "ended 2"], INTERRUPTED, CONTINUE, True),  # in this job, which found no record
        (["begun", "ended 1"], FAILED, CONTINUE, True),
        (["begun", "ended 2"], FAILED, STOP, False),
        (["begun", "ended 2"], None, STOP, False),
        (["begun", "ended 2"] * 3, FAILED, CONTINUE, False),
        (["begun", "ended 0"], {"status": "ok"}, COMPLETE, False),
        (["begun", "ended 2"], ["no", "record"], STOP, False),
    ],
)
def test_what_the_next_job_does(write, lines, found, expected, left):
    chain = write(lines, found)
    code, note = chain.decide()
    assert (code, chain.has_jobs_left) == (expected, left)
    assert bool(note) == (code != CONTINUE)
    assert ("planted" in note) == (code == STOP and found == FAILED)


@pytest.mark.parametrize(("earlier_s", "expected"), [(0, STOP), (60, CONTINUE)])
def test_a_job_that_did_not_change_an_interrupted_record(write, tmp_path, earlier_s, expected):
    """Its restart was refused, or its preflight failed; the next job would end in the same way."""
    write(["begun", "ended 138"], INTERRUPTED)
    found = int((tmp_path / "run.json").stat().st_mtime) - earlier_s
    code, note = write([f"begun {found}", "ended 2"]).decide()
    assert (code, "SIGUSR1" in note) == (expected, False)  # which ended the job before


JOB = """\
echo begun >>job.chain
[ "$(grep -c begun job.chain)" -lt 3 ] || set -- ok 0
printf '{"status": "%s"}' "$1" >run.json
echo "ended $2" >>job.chain
exit "$2"
"""
"""What a job does whose run has this status and this exit code; the third one is complete."""


@pytest.mark.parametrize(
    ("words", "num_jobs", "code", "parts"),
    [("interrupted 138", 5, 0, 3), ("interrupted 138", 2, 138, 2), ("failed 2", 5, 2, 1)],
)
def test_a_chain_on_this_machine(words, num_jobs, code, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin_chain(tmp_path, num_jobs)
    assert run_here(["sh", "-c", JOB, "job", *words.split()], tmp_path, num_jobs) == code
    assert len(Chain.read(tmp_path).codes) == parts
