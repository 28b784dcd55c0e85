"""How often a process may be restarted."""

from common.restarts import Restarts


def test_restarts_of_an_hour_ago_are_forgotten(monkeypatch):
    restarts = Restarts(1)
    assert restarts.take() and not restarts.take()
    monkeypatch.setattr("common.restarts.HOUR_S", 0.0)
    assert restarts.take()
