r"""Equality of mathematical answers. Expectations are worked out by hand, except for those marked, where we state what
math-verify decides."""

import threading

import pytest

from rollout.rewards import mathematics
from rollout.rewards.deadline import DeadlineExceeded, WorkerDied
from rollout.rewards.mathematics import math_equal


class Refuse:
    """Stands where the processes would be, to show that a comparison does without."""

    def call(self, *arguments, timeout_s):
        raise AssertionError(f"a process was asked about {arguments}")


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("8", "8", True),
        (" $8$. ", "8", True),
        (r"\(8\)", r"\[ 8 \]", True),
        ("23", "023", True),
        ("-5", "5", False),
        ("8.0", "8", True),
        ("8" * 5000, "8" * 5000, True),
        (r"\text{Paris}", "paris", True),
        ("Pairs", "Paris", False),
        (r"\text{Grey Harbor}", "grey  harbor", True),
        (r"\frac{8", "8", False),
        ("", "", False),
        ("(2, 3)", "(2, 3)", True),
    ],
)
def test_decided_without_a_process(monkeypatch, prediction, gold, expected):
    monkeypatch.setattr(mathematics, "_PROCESSES", Refuse())
    assert math_equal(prediction, [gold]) is expected


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        (r"3\sqrt{3}-6", r"3\sqrt{3} - 6", True),
        (r"\frac{1}{2}", "0.5", True),
        ("12", "1/2", False),
        ("0.5", "05", False),
        ("5", "05.0", True),
        ("x = 8", "8", True),
        ("x=8", "y=8", False),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x", "(x+1)^2", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("1, 2", "2, 1", True),
        ("8, 9", "8", False),
        ("[0,1)", "[0, 1)", True),
        ("[0,1)", "[0,1]", False),
        (r"(-\infty, 2)", "x<2", True),
        (r"50\%", "50", True),
        (r"50\%", "5", False),
        ("1,000", "1000", True),
        (r"5 \text{ cm}", "5", True),
        ("0.333333", r"\frac{1}{3}", True),
        ("0.33", r"\frac{1}{3}", False),
        ("3.14", r"\pi", False),
        ("The answer is 8", "8", False),
    ],
)
def test_decided_by_math_verify(prediction, gold, expected):
    assert math_equal(prediction, [gold]) is expected


def test_any_gold_answer_will_do_and_no_answer_equals_nothing():
    assert math_equal(r"\frac{1}{2}", ["7", "0.5"])
    assert not math_equal(None, ["7"])
    assert not math_equal("7", [])


def test_from_many_threads_at_once():
    wrong = []

    def check(number):
        if not math_equal(rf"\frac{{{2 * number}}}{{2}}", [f"{number}.0"]):
            wrong.append(number)

    threads = [threading.Thread(target=check, args=(number,)) for number in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("hostile", ["10^{10^{10}}", "(100000!)!"])
def test_what_never_ends_is_not_equal_at_the_deadline(caplog, hostile):
    assert not math_equal(hostile, ["8"], timeout_s=0.5)
    assert "took more than 0.5 s" in caplog.text
    assert math_equal(r"\frac{16}{2}", ["8.0"]), "a new process takes the place of the one that was killed"


@pytest.mark.parametrize("hostile", [r"\frac{1}{" * 90 + "2" + "}" * 90, "(" * 450 + "1" + ")" * 450])
def test_deep_nesting_ends(hostile):
    assert not math_equal(hostile, ["8"], timeout_s=0.5)


def test_an_answer_that_kills_its_process_is_tried_again_once(monkeypatch, caplog):
    class Falls:
        calls = 0

        def call(self, *arguments, timeout_s):
            self.calls += 1
            if self.calls < 2 or arguments[0] == "y+2":
                raise WorkerDied("the process ended with exit code -11")
            return True

    falls = Falls()
    monkeypatch.setattr(mathematics, "_PROCESSES", falls)
    assert math_equal("y+1", ["z+1"])
    assert falls.calls == 2 and not caplog.text
    assert not math_equal("y+2", ["z+1"])
    assert falls.calls == 4 and "exit code -11" in caplog.text


def test_a_deadline_missed_once_is_no_verdict(monkeypatch):
    class Slow:
        calls = 0

        def call(self, *arguments, timeout_s):
            self.calls += 1
            if self.calls == 1:
                raise DeadlineExceeded("the machine is busy")
            return True

    slow = Slow()
    monkeypatch.setattr(mathematics, "_PROCESSES", slow)
    assert not math_equal("u+1", ["1+u"])
    assert math_equal("u+1", ["1+u"]) and math_equal("u+1", ["1+u"])
    assert slow.calls == 2, "what was decided is remembered"
