"""Where iterators are, and copies of them at the same place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from signalfire.resuming.iterators import Position, is_iterator, place_of

DATA = [3, 1, 2, 5, 4]

MADE: dict[str, Any] = {
    "list": lambda: iter(DATA),
    "reversed list": lambda: reversed(DATA),
    "tuple": lambda: iter(tuple(DATA)),
    "text": lambda: iter("abcde"),
    "range": lambda: iter(range(9)),
    "large range": lambda: iter(range(2**70)),
    "keys": lambda: iter(dict.fromkeys(DATA)),
    "set": lambda: iter({*DATA}),
    "enumerate": lambda: enumerate(iter(DATA)),
    "zip": lambda: zip(iter(DATA), itertools.count(), strict=False),
    "map": lambda: map(abs, iter(DATA)),
    "filter": lambda: filter(None, iter(DATA)),
    "count": itertools.count,
    "count by steps": lambda: itertools.count(1.5, 0.5),
    "cycle": lambda: itertools.cycle(DATA[:3]),
    "cycle of an iterator": lambda: itertools.cycle(iter(DATA[:3])),
    "repeat": lambda: itertools.repeat(1, 20),
    "chain": lambda: itertools.chain(DATA[:2], iter(DATA)),
    "islice": lambda: itertools.islice(itertools.count(), 1, None),
    "accumulate": lambda: itertools.accumulate(iter(DATA)),
    "product": lambda: itertools.product(DATA, DATA),
    "permutations": lambda: itertools.permutations(DATA),
    "nested": lambda: zip(map(abs, itertools.cycle(iter(DATA[:3]))), enumerate(itertools.count(5)), strict=False),
}


@pytest.mark.whole
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("drawn", [0, 1, 2, 4])
def test_an_iterator_goes_back_as_often_as_is_asked(made: Any, drawn: int) -> None:
    kept, other = made(), made()
    assert is_iterator(kept)
    for one in (kept, other):
        list(itertools.islice(one, drawn))
    expected = list(itertools.islice(other, 4))
    position = Position(kept)
    assert position.restored() is kept  # nothing was drawn
    for _ in range(3):
        assert list(itertools.islice(position.restored(), 4)) == expected


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_place_changes_whenever_something_is_drawn(made: Any) -> None:
    iterator = made()
    places = [place_of(iterator)]
    for _ in itertools.islice(iterator, 3):
        assert place_of(iterator) == place_of(iterator)
        places.append(place_of(iterator))
    assert len({*map(repr, places)}) == len(places)


def test_generators_have_a_place_but_no_copy() -> None:
    def steps() -> Iterator[int]:
        step = 0
        while step < 3:
            yield step
            step += 1

    generator = steps()
    places = [place_of(generator)]
    for _ in generator:
        places.append(place_of(generator))
    assert len({*places, place_of(generator)}) == 5
    position = Position(generator)
    assert position.restored() is generator  # it has ended, as before


def test_what_cannot_be_copied_is_left_where_it_is_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("1\n2\n3\n")
    with (tmp_path / "numbers").open() as file:
        assert not is_iterator(file)
        lines = enumerate(file)
        position = Position(lines)
        next(lines)
        with pytest.warns(UserWarning, match="the enumerate that a module or function uses cannot go back"):
            assert position.restored() is lines
        assert next(lines) == (1, "2\n")
