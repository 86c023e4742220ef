"""Attributes that are replaced come back as they were, also inherited ones."""

from port_agent.intercept.patches.replaced_attributes import ReplacedAttributes


class Base:
    inherited = own = 1


class Derived(Base):
    own = 2


def test_own_and_inherited_attributes_come_back() -> None:
    replaced, before = ReplacedAttributes(), dict(vars(Derived))
    for value in (3, 4):
        replaced.replace(Derived, "own", value)
    replaced.replace(Derived, "inherited", 5)
    assert (Derived.own, Derived.inherited, Base.inherited) == (4, 5, 1)
    assert replaced.has_any_of(Derived) and not replaced.has_any_of(Base)
    replaced.put_back()
    assert dict(vars(Derived)) == before and not replaced.has_any_of(Derived)
