"""A compiled model as a library for a program of the user's own: Arduino, PlatformIO, Zephyr, the Pico SDK, ESP-IDF.

One folder of flat C sources (engine, kernels, model, `firmware/library`), the framework's own
build file, and an example.
"""

import enum
import re
from collections.abc import Callable
from pathlib import Path

from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.board.firmware import kernel_kinds, page_medium, source_root
from port_agent.mcu.protocol.board_model import ModelDirectory
from port_agent.system.atomic_file import write_atomically

VERSION = "0.1.0"
EXACT = '#include "port_exact.h"\n'
GUARD = "#define PORT_EXACT_H\n"
FLAG = "-ffp-contract=off"


class Framework(enum.Enum):
    """The framework for which the library is packaged."""

    ARDUINO = "arduino"
    PLATFORMIO = "platformio"
    ZEPHYR = "zephyr"
    PICO_SDK = "pico-sdk"
    ESP_IDF = "esp-idf"


def write_library(model: ModelDirectory, framework: Framework, out: Path) -> Path:
    """Write the package of a compiled model into `out`; return its path.

    Raises BoardJobError for a model that needs an external memory, or whose input has no scale.
    """
    if page_medium(model.path) is not None:
        raise BoardJobError(
            f"{model.name} pages to an external memory, which a library has no driver for; compile it without --page"
        )
    for name, content in library_files(model, framework).items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode())
    return out


def library_files(model: ModelDirectory, framework: Framework) -> dict[str, str]:
    """Return the files of a package, by their path in the package."""
    root, name = source_root(), library_name(model)
    sources = {f"src/{file}": text for file, text in _sources(root, model).items()}
    return sources | _PACKAGES[framework](name, root / "library", [file for file in sources if file.endswith(".c")])


def library_name(model: ModelDirectory) -> str:
    """Return a name that every framework accepts: letters, digits and underscores."""
    return "port_" + re.sub(r"\W", "_", model.name).lower()


def _sources(root: Path, model: ModelDirectory) -> dict[str, str]:
    folders = (root / "include", root / "engine", root / "kernels")
    files = [path for folder in folders for path in sorted(folder.glob("*.[ch]"))]
    files += [root / "protocol" / name for name in ("bytes.h", "crc32.c", "crc32.h")]
    files += sorted((root / "library").glob("port_*.[ch]"))
    found = {path.name: re.sub(r'#include "[^"]*/([^/"]+)"', r'#include "\1"', path.read_text()) for path in files}
    kinds = f"#define PORT_KINDS {kernel_kinds(model.path):#x}u /* those of the model; other kernels stay out of the program */"
    found["port_exact.h"] = found["port_exact.h"].replace(GUARD, f"{GUARD}\n{kinds}\n")
    exact = {name: text if EXACT in text or name.endswith(".h") else EXACT + text for name, text in found.items()}
    tables = {
        name: (model.path / name).read_text() for name in ("model.c", "model.h")
    }  # to the byte: its hash covers it
    return exact | tables | {"port_sample.h": _sample_header(model)}


def _sample_header(model: ModelDirectory) -> str:
    form = model.input
    if form is None:
        raise BoardJobError(f"{model.path} does not give the scale of its input; compile the model again")
    return f"""/* The input of {model.name}: real values [{form.channels}][{form.height}][{form.width}]. */
#ifndef PORT_SAMPLE_H
#define PORT_SAMPLE_H

#define PORT_SAMPLE_CHANNELS {form.channels}u
#define PORT_SAMPLE_PLACES {form.height * form.width}u
#define PORT_SAMPLE_VALUES {form.channels * form.height * form.width}u
#define PORT_SAMPLE_SCALE {form.scale.hex()}f
#define PORT_SAMPLE_ZERO ({form.zero})

#endif
"""


def _example(templates: Path, define: str = "") -> str:
    text = (templates / "example.c").read_text()
    return f"#define {define}\n{text}" if define else text


def _arduino(name: str, templates: Path, sources: list[str]) -> dict[str, str]:
    properties = {
        "name": name, "version": VERSION, "author": "PORT agent", "maintainer": "PORT agent",
        "sentence": "A model that is trained on the board.", "category": "Data Processing",
        "paragraph": f"Its sources turn {FLAG} on; check what port_library_begin returns.",
        "url": "https://example.invalid", "architectures": "*", "includes": "port_library.h",
    }  # fmt: skip
    return {
        "library.properties": "".join(f"{key}={value}\n" for key, value in properties.items()),
        "src/example.h": (templates / "example.h").read_text(),
        "examples/adapt/adapt.ino": (templates / "sketch.ino").read_text(),
    }


def _platformio(name: str, templates: Path, sources: list[str]) -> dict[str, str]:
    return {
        "library.json": f'{{"name": "{name}", "version": "{VERSION}", "build": {{"flags": ["{FLAG}"]}}}}\n',
        "src/example.h": (templates / "example.h").read_text(),
        "examples/adapt/main.cpp": (templates / "sketch.ino").read_text(),
    }


def _zephyr(name: str, templates: Path, sources: list[str]) -> dict[str, str]:
    listed = "\n  ".join(sources)
    return {
        "zephyr/module.yml": f"name: {name}\nbuild:\n  cmake: .\n",
        "CMakeLists.txt": f"zephyr_include_directories(src)\nzephyr_library_named({name})\n"
        f"zephyr_library_compile_options({FLAG})\nzephyr_library_sources(\n  {listed})\n",
        "src/example.h": (templates / "example.h").read_text(),
        "samples/adapt/CMakeLists.txt": "cmake_minimum_required(VERSION 3.20)\n"
        "list(APPEND ZEPHYR_EXTRA_MODULES "
        "${CMAKE_CURRENT_SOURCE_DIR}/../..)\n"
        "find_package(Zephyr REQUIRED HINTS $ENV{ZEPHYR_BASE})\n"
        "project(adapt C)\n"
        "target_sources(app PRIVATE src/main.c)\n",
        "samples/adapt/prj.conf": "CONFIG_FPU=y\nCONFIG_CONSOLE_GETLINE=n\nCONFIG_MAIN_STACK_SIZE=4096\n",
        "samples/adapt/src/main.c": _example(templates),
    }


def _pico_sdk(name: str, templates: Path, sources: list[str]) -> dict[str, str]:
    listed = "\n  ".join(sources)
    return {
        "CMakeLists.txt": f"add_library({name} STATIC\n  {listed})\ntarget_include_directories({name} PUBLIC src)\n"
        f"target_compile_options({name} PRIVATE {FLAG})\n",
        "src/example.h": (templates / "example.h").read_text(),
        "examples/adapt/CMakeLists.txt": "cmake_minimum_required(VERSION 3.13)\n"
        "include($ENV{PICO_SDK_PATH}/external/pico_sdk_import.cmake)\n"
        "project(adapt C CXX ASM)\n"
        "pico_sdk_init()\n"
        f"add_subdirectory(../.. {name})\n"
        "add_executable(adapt main.c)\n"
        f"target_link_libraries(adapt {name} pico_stdlib)\n"
        "pico_enable_stdio_usb(adapt 1)\n"
        "pico_add_extra_outputs(adapt)\n",
        "examples/adapt/main.c": _example(templates, "PORT_EXAMPLE_PICO"),
    }


def _esp_idf(name: str, templates: Path, sources: list[str]) -> dict[str, str]:
    listed = " ".join(f'"{source}"' for source in sources)
    return {
        "CMakeLists.txt": f'idf_component_register(SRCS {listed} INCLUDE_DIRS "src")\n'
        f"target_compile_options(${{COMPONENT_LIB}} PRIVATE {FLAG})\n",
        "idf_component.yml": f'version: "{VERSION}"\ndescription: A model that is trained on the board.\n',
        "src/example.h": (templates / "example.h").read_text(),
        "examples/adapt/CMakeLists.txt": "cmake_minimum_required(VERSION 3.16)\nset(EXTRA_COMPONENT_DIRS ../..)\n"
        "include($ENV{IDF_PATH}/tools/cmake/project.cmake)\nproject(adapt)\n",
        "examples/adapt/main/CMakeLists.txt": 'idf_component_register(SRCS "main.c")\n',
        "examples/adapt/main/main.c": _example(templates, "PORT_EXAMPLE_ESP_IDF"),
    }


_PACKAGES: dict[Framework, Callable[[str, Path, list[str]], dict[str, str]]] = {
    Framework.ARDUINO: _arduino,
    Framework.PLATFORMIO: _platformio,
    Framework.ZEPHYR: _zephyr,
    Framework.PICO_SDK: _pico_sdk,
    Framework.ESP_IDF: _esp_idf,
}
