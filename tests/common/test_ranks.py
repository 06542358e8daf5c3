"""What the environment may say of this process, and what it may not."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.ranks import Place, read_place

_ALL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def place_of(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def read(variables: dict[str, str]) -> Place:
        for name in _ALL:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return read_place()

    return read


def test_places(place_of) -> None:  # type: ignore[no-untyped-def]
    assert place_of({}) == Place(0, 1, 0)
    assert place_of({"MASTER_ADDR": "localhost"}) == Place(0, 1, 0)  # some shells set it for good
    assert place_of(_ALL) == Place(1, 2, 0)
    assert place_of({k: v for k, v in _ALL.items() if k != "LOCAL_RANK"}) == Place(1, 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not set though RANK is"),
        ({"RANK": ""}, "RANK not set though"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
        ({"RANK": "-1"}, "RANK must be a number, got '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, got 'two'"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a number"),
    ],
)
def test_contradictions(place_of, change: dict[str, str], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        place_of(_ALL | change)
    assert message in str(caught.value)
