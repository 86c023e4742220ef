"""Where our packages lie."""

import port_agent
import port_planner
from port_planner.base.source_roots import FIRMWARE_SOURCES, PACKAGE_FOLDERS, SOURCE_ROOTS


def test_our_packages_are_where_they_were_imported_from() -> None:
    assert tuple(str(folder / "__init__.py") for folder in PACKAGE_FOLDERS) == (
        port_agent.__file__,
        port_planner.__file__,
    )


def test_a_root_holds_our_packages_and_no_other_module() -> None:
    beside = {path.name for root in SOURCE_ROOTS for path in root.iterdir() if (path / "__init__.py").is_file()}
    assert {"port_agent", "port_planner"} <= beside
    if len(SOURCE_ROOTS) == 2:  # a checkout
        assert beside == {"port_agent", "port_planner"}


def test_the_firmware_lies_in_the_package() -> None:
    assert (FIRMWARE_SOURCES / "include" / "port_engine.h").is_file()
