"""Processes of their own: what is returned, and every way to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from gpytorch_tkrr.comparison.process import Isolation, call

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="slow where processes cannot be forked")


@pytest.fixture(scope="module")
def isolation():
    with Isolation(time_limit=60.0) as isolation:
        yield isolation


def test_returns_what_the_function_returns(isolation):
    offset = torch.arange(3.0)  # a closure, which pickle alone cannot send
    outcome = isolation.call(lambda x: x + offset, torch.ones(3))
    assert outcome.ending == "returned" and outcome.value.tolist() == [1.0, 2.0, 3.0]
    assert isolation.call(os.getpid).value != os.getpid()


def test_exceptions_come_back(isolation):
    def fail():
        raise KeyError("not there")

    for outcome in (isolation.call(fail), call(fail)):
        assert outcome.ending == "raised" and isinstance(outcome.value, KeyError)
        assert outcome.message == "KeyError: 'not there'"


def test_a_crash_is_reported_and_the_next_call_works(isolation):
    assert isolation.call(os._exit, 7).ending == "crashed"
    killed = isolation.call(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert killed.ending == "out of memory"  # the only one who kills without asking
    assert isolation.call(max, 1, 2).value == 2


def test_what_cannot_be_sent_is_reported(isolation):
    outcome = isolation.call(lambda: sys.stdout)
    assert outcome.ending == "raised" and "pickle" in outcome.message
    outcome = isolation.call(max, (number for number in range(3)))
    assert outcome.ending == "raised" and "isolate=False" in outcome.message


def test_printing_does_not_disturb_the_answers(isolation):
    for text in ("null\n", "1\n", "no JSON\n"):
        assert isolation.call(os.write, 1, text.encode()).ending == "returned"
    assert isolation.call(os._exit, 3).message == "Its process ended with code 3."


def test_limits():
    with Isolation(time_limit=0.5, memory_limit=2 << 30) as isolation:
        late = isolation.call(time.sleep, 60)
        assert late.ending == "out of time" and "0.5 s" in late.message
        if sys.platform == "linux":
            assert isolation.call(lambda: torch.ones(1 << 30).sum()).ending == "out of memory"
        assert isolation.call(max, 1, 2).value == 2


def test_the_script_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from gpytorch_tkrr.comparison.process import Isolation\n"
        "class Mine:\n    value = 5\n"
        "print('once')\n"
        "with Isolation() as isolation:\n    print(isolation.call(lambda: Mine().value).value)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout == "once\n5\n", done.stderr
