"""The rooms of the core: imports between them go one way, and the picture shows them."""

from __future__ import annotations

import pytest

from amanda_docs.rooms import CORE, GROUND, PICTURE, arrows, drawn, floors, picture


def test_imports_between_rooms_go_one_way() -> None:
    rooms = arrows()
    assert {"plan", "scope", "eager", "graph", "export", "plugins", "interceptor"} <= rooms.keys()
    height = {room: level for level, floor in enumerate(floors(rooms)) for room in floor}
    assert all(height[other] < height[room] for room, others in rooms.items() for other in others)


def test_the_ground_imports_no_room() -> None:
    for name in GROUND:
        imported = [line for line in (CORE / f"{name}.py").read_text().splitlines() if "amanda." in line]
        assert all("from amanda.errors import" in line for line in imported if "import" in line)


def test_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="rooms import each other: one, two"):
        floors({"one": frozenset({"two"}), "two": frozenset({"one"}), "three": frozenset()})


def test_an_arrow_that_follows_from_others_is_not_drawn() -> None:
    rooms = {"top": frozenset({"middle", "ground"}), "middle": frozenset({"ground"}), "ground": frozenset()}
    assert sorted(drawn(rooms)) == [("middle", "ground"), ("top", "middle")]


def test_the_picture_is_that_of_the_imports() -> None:
    assert PICTURE.read_text() == picture(arrows()), "python -m amanda_docs.rooms, with website/ on the path"


@pytest.mark.parametrize("room", ["plan", "scope", "eager", "graph", "export"])
def test_a_room_says_what_comes_in_what_goes_out_and_who_calls(room: str) -> None:
    text = (CORE / room / "__init__.py").read_text()
    assert "\nIn: " in text
    assert "Out: " in text
    assert "\nCalled by " in text
