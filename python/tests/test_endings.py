"""How a trainer ends: well, by an error, by a signal."""

import signal
import time

import pytest
from conftest import DEADLINE, Jobs, Record, interrupt, succeed

TRAIN = """
job = psjobs.join()
model, opt = job.attach(net())
for number, (x, y) in enumerate(job.batches(data, 8)):
    value = loss(model(x), y)
    BODY
    value.backward()
    opt.step()
    print(job.step, flush=True)
"""


WATCH = """
import threading, time
def watch(main=threading.get_ident(), end=time.monotonic() + 60):
    for function, word in FUNCTIONS:
        while sys._current_frames()[main].f_code.co_name != function:
            if time.monotonic() > end:
                print("is not in", function, flush=True)
                return
            time.sleep(0.001)
        print(word, flush=True)
threading.Thread(target=watch, daemon=True).start()
"""


def watched(**words: str) -> str:
    """Prints a word when the script is in a function, one function after the other, from a thread, which runs meanwhile."""
    return WATCH.replace("FUNCTIONS", repr(list(words.items())))


WATCHED = watched(_wait_for_exchange="waits")
"""Says when the script waits for the other trainers."""


CAUGHT = """
    try:
        opt.step()
    except KeyboardInterrupt:
        print("answered", time.time(), flush=True)
        raise
""".strip()


def script(body: str) -> str:
    return TRAIN.replace("BODY", body)


def test_a_script_that_comes_back_when_the_others_have_done_the_work_ends_well(jobs: Jobs) -> None:
    job = jobs.start()
    trainer = job.trainer(0, script("if number == 3: raise psjobs._native.Over('the trainers have finished')"))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 0, said
    assert "psjobs: the trainers have finished" in said
    assert "Traceback" not in said


def test_an_exception_of_the_script_reaches_the_server_with_its_text(jobs: Jobs) -> None:
    job = jobs.start()
    trainer = job.trainer(0, script("assert number < 3, 'the fourth batch is bad'"))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 1 and "Traceback" in said and "the fourth batch is bad" in said
    assert job.server.wait(DEADLINE) == 1
    log = job.log.read_text()
    assert "AssertionError: the fourth batch is bad (" in log and "assert number < 3" in log, log


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(4)", 4, "exit code 4"),
        ("sys.exit('no data')", 1, "exit code no data"),
    ],
    ids=["a code", "a text"],
)
def test_a_script_that_exits_with_a_code_has_not_finished(jobs: Jobs, end: str, code: int, words: str) -> None:
    job = jobs.start()
    trainer = job.trainer(0, script(f"if number == 2: {end}"))
    assert trainer.wait(DEADLINE) == code
    assert job.server.wait(DEADLINE) == 1 and words in job.log.read_text()


@pytest.mark.parametrize(
    "end",
    ["raise SystemExit", "sys.exit(0)", "try: sys.exit(4)\nexcept SystemExit as error: assert error.code == 4"],
    ids=["no code", "code 0", "caught"],
)
def test_a_script_that_exits_without_a_code_has_finished(jobs: Jobs, end: str) -> None:
    job = jobs.start()
    (said,) = succeed(job.trainer(0, script("pass") + end + "\n"))
    assert "Traceback" not in said
    assert job.server.wait(DEADLINE) == 0


def test_a_thread_that_exits_says_nothing_and_ends_only_itself(jobs: Jobs) -> None:
    job = jobs.start()
    thread = "import threading\nthread = threading.Thread(target=lambda: sys.exit(4))\nthread.start()\nthread.join()\n"
    (said,) = succeed(job.trainer(0, script("pass") + thread))
    assert "Traceback" not in said
    assert job.server.wait(DEADLINE) == 0


def test_a_gradient_that_is_not_finite_is_named(jobs: Jobs) -> None:
    job = jobs.start()
    trainer = job.trainer(0, script("if number == 2: value = value + model[2].bias.sum() * float('nan')"))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 1
    assert "trainer 0: the gradient of 2.bias is not finite at step 2" in said, said


def test_a_model_that_is_not_the_jobs_ends_with_code_2_and_both_shapes(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    first = job.trainer(0, WATCHED + script("pass"))
    # Its step waits for the other trainer, so the model is the job's.
    assert first.stdout is not None and first.stdout.readline() == "waits\n"
    other = job.trainer(1, script("pass").replace("net()", "nn.Linear(6, 3)"))
    _, said = other.communicate(timeout=DEADLINE)
    assert other.returncode == 2
    assert "only the job has 0.weight [16, 6]" in said and "only the trainer has weight [3, 6], bias [3]" in said, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("mode", "attach", "is_error"),
    [
        ("sync", "net()", True),
        ("sync", "net(), missing='zero'", False),
        ("async", "net()", False),
        ("async", "net(), missing='error'", True),
    ],
)
def test_parameters_without_a_gradient_are_named(jobs: Jobs, mode: str, attach: str, is_error: bool) -> None:
    job = jobs.start("--consistency", mode, consistency={"mode": mode.title()})
    body = script("value = loss(model[:2](x)[:, :3], y)").replace("net()", attach)
    trainer = job.trainer(0, body)
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == (2 if is_error else 0), said
    assert said.count("no gradient reached 2.weight, 2.bias in step 0") == 1, said
    assert ("missing=" in said) == is_error, said


def test_ctrl_c_is_answered_while_the_trainer_waits_for_others(jobs: Jobs, record_property: Record) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    alone = job.trainer(0, WATCHED + script("pass").replace("opt.step()", CAUGHT))
    assert alone.stdout is not None and alone.stdout.readline() == "waits\n"
    began = time.time()
    interrupt(alone)
    said, error = alone.communicate(timeout=DEADLINE)
    assert alone.returncode == -signal.SIGINT, error
    word, answered = said.split()
    assert word == "answered"
    record_property("Ctrl-C", f"answered after {(float(answered) - began) * 1e3:.0f} ms")
    assert "left" in job.log.read_text()


HANDLER = """
import signal
def handle(*_):
    try:
        job.report({})
        print("early", flush=True)
    except psjobs.Error:
        job.leave()
signal.signal(signal.SIGUSR1, handle)
"""


def test_a_handler_of_a_signal_that_calls_psjobs_within_a_wait_gets_an_error(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    alone = job.trainer(0, HANDLER + WATCHED + script("pass"))
    assert alone.stdout is not None and alone.stdout.readline() == "waits\n"
    # The first signals may come before the session waits.
    alone.send_signal(signal.SIGUSR1)
    while alone.stdout.readline() == "early\n":
        alone.send_signal(signal.SIGUSR1)
    _, said = alone.communicate(timeout=DEADLINE)
    assert alone.returncode == 1, said
    assert "a handler of a signal has called psjobs while this trainer waits for servers" in said, said


def test_sigterm_lets_the_trainer_leave_for_its_replacement(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    alone = job.trainer(0, WATCHED + script("pass"))
    assert alone.stdout is not None and alone.stdout.readline() == "waits\n"
    alone.send_signal(signal.SIGTERM)
    assert alone.wait(DEADLINE) == 128 + signal.SIGTERM
    assert "finished=false" in job.log.read_text()


@pytest.mark.parametrize(
    ("error", "supervised", "code"), [("PeerAway", "0", 75), ("Conflict", "1", 75), ("Conflict", "0", 1)]
)
def test_an_error_by_other_processes_ends_with_code_75_and_is_not_reported(
    jobs: Jobs, error: str, supervised: str, code: int
) -> None:
    job = jobs.start()
    body = f"if number == 2: raise psjobs.{error}('it is another process')"
    trainer = job.trainer(0, script(body), PSJOB_SUPERVISED=supervised)
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == code and "it is another process" in said, said
    assert ("Traceback" in said) == (code == 1), said
    assert "it is another process" not in job.log.read_text()


def test_a_server_that_is_gone_when_the_trainer_leaves_ends_it_with_code_75(jobs: Jobs) -> None:
    job = jobs.start()
    body = """
    print("waits", flush=True)
    while not job.should_stop: time.sleep(0.001)
    break
    """
    trainer = job.trainer(0, "import time\n" + script(body.strip()))
    assert trainer.stdout is not None and trainer.stdout.readline() == "waits\n"
    job.server.kill()
    job.server.wait(DEADLINE)
    trainer.send_signal(signal.SIGTERM)
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 75 and "did not answer" in said and "Traceback" not in said, said


def test_a_server_of_another_job_is_waited_for_only_where_somebody_starts_servers_again(jobs: Jobs) -> None:
    job = jobs.start()
    by_hand = job.trainer(0, script("pass"), PSJOB_UID="other")
    _, said = by_hand.communicate(timeout=DEADLINE)
    assert by_hand.returncode == 1 and "another job than other" in said, said
    supervised = job.trainer(0, script("pass"), PSJOB_UID="other", PSJOB_SUPERVISED="1")
    assert supervised.stderr is not None
    reported = next((line for line in supervised.stderr if "waiting for server 0" in line), "it has ended")
    assert "another job than other" in reported
    supervised.send_signal(signal.SIGTERM)
    assert supervised.wait(DEADLINE) == 128 + signal.SIGTERM


def test_a_forked_process_can_neither_use_nor_end_the_session(jobs: Jobs) -> None:
    job = jobs.start()
    body = """
    if number == 2:
        child = os.fork()
        if child == 0:
            try:
                job._exchange(job._parameters)
            except RuntimeError as error:
                assert 'forked' in str(error), error
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    succeed(job.trainer(0, script(body.strip())))
    assert job.server.wait(DEADLINE) == 0


@pytest.mark.parametrize("last", ["", "job.leave()\nprint('goes on', flush=True)\n"])
def test_sigterm_after_the_last_step_is_no_success_while_the_servers_may_lose_it(jobs: Jobs, last: str) -> None:
    job = jobs.start()
    go = job.folder / "go"
    ready = "import time\nprint('ready', flush=True)\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.001)\n"
    trainer = job.trainer(0, script("pass") + ready + watched(_keep="waits", leave="leaves") + last, GO=str(go))
    assert trainer.stdout is not None and any(line == "ready\n" for line in trainer.stdout)
    job.server.send_signal(signal.SIGSTOP)
    go.touch()
    assert trainer.stdout.readline() == "waits\n"
    trainer.send_signal(signal.SIGTERM)
    assert trainer.stdout.readline() == "leaves\n"
    job.server.send_signal(signal.SIGCONT)
    said, error = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 128 + signal.SIGTERM and "goes on" not in said, (said, error)
    assert "Traceback" not in error and "Exception" not in error, error
    assert "finished=false" in job.log.read_text()
