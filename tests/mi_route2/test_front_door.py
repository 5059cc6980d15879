"""The package's front: what it names is there, and says what it is."""

import pytest

import mi_route2


@pytest.mark.parametrize("name", mi_route2.__all__)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(mi_route2, name)
    assert found.__name__ == name
    assert found.__doc__
    assert found.__module__.startswith("mi_route2.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        _ = mi_route2.Enginee
