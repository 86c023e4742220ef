"""The boards to which the firmware is ported.

It lists memory, compiler flags, USB identities, and how to flash and simulate them.

Addresses and sizes come from the sources named in each port under firmware/ports. "Emulated" boards run in QEMU and in
this project's tests; the others are only compiled there, and the authors have not run them on real hardware.
"""

import enum
from dataclasses import dataclass, field, replace

from port_agent.mcu.board.board_errors import BoardJobError

KIB = 1024


class FlashMethod(enum.Enum):
    """How an image reaches a board."""

    DAPLINK = "daplink"  # copy a .hex to the board's drive
    UF2 = "uf2"  # copy a .uf2 to the boot loader's drive
    BOOTSEL = "bootsel"  # the same, to the drive of a Pico's ROM
    NRFUTIL = "adafruit-nrfutil"  # serial DFU
    STM32LOADER = "stm32loader"  # ROM boot loader over UART
    BOSSAC = "bossac"  # SAM-BA boot loader
    PYOCD = "pyocd"  # a debug probe
    NONE = "none"  # simulated: the simulator loads the image


@dataclass(frozen=True, slots=True)
class UsbId:
    """Vendor and product of a USB serial port."""

    vendor: int
    product: int

    def __str__(self) -> str:
        return f"{self.vendor:04x}:{self.product:04x}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A QEMU machine that imitates a board."""

    name: str
    arguments: tuple[str, ...] = ()
    storage_bytes: int | None = None
    """Size in bytes of the memory that the simulator backs with a file; None: the machine's own
    flash, which is lost at a kill.
    """


@dataclass(frozen=True, slots=True)
class FirmwareBoard:
    """One board as the build, the flasher and the simulator need it. Sizes in bytes."""

    name: str
    title: str
    port: str
    """Directory of the port under firmware/ports."""
    cpu: tuple[str, ...]
    """Compiler flags that choose the core; empty: the host's own compiler."""
    ram_bytes: int
    flash_bytes: int
    payload_bytes: int
    ring_bytes: int
    stack_bytes: int
    """Least bytes that the linker reserves for the stack."""
    ram_origin: int = 0x2000_0000
    flash_origin: int = 0
    """Address at which the image starts: behind the boot loader, if there is one."""
    flash_reserved_bytes: int = 0
    """Bytes of the boot loader and its settings, before and after the image."""
    page_bytes: int = 1 * KIB
    interrupts: int = 32
    uart_interrupt: int = 0
    has_storage: bool = True
    """Whether the device has snapshot slots; QEMU does not emulate every flash controller."""
    storage_origin: int | None = None
    """Address of snapshot slots outside the flash; None: they are the last pages of the flash."""
    defines: dict[str, int] = field(default_factory=dict)
    media: dict[str, dict[str, int]] = field(default_factory=dict)
    """External memory for a model's pages (psram, nor, sd), each with the settings that the port needs."""
    usb: tuple[UsbId, ...] = ()
    methods: tuple[FlashMethod, ...] = ()
    probe_target: str | None = None
    """Name of the chip in pyOCD."""
    uf2_family: int | None = None
    machine: Machine | None = None
    figures: str = "nrf52840"
    """The file in planner/port_planner/ir/board_files whose clock and watts represent this board in estimates."""


M0 = ("-mcpu=cortex-m0",)
M0PLUS = ("-mcpu=cortex-m0plus",)
M3 = ("-mcpu=cortex-m3",)
M4F = ("-mcpu=cortex-m4", "-mfpu=fpv4-sp-d16", "-mfloat-abi=hard")
M7F = ("-mcpu=cortex-m7", "-mfpu=fpv5-sp-d16", "-mfloat-abi=hard")

_PSRAM_BYTES = 16 * KIB * KIB


_LARGE = FirmwareBoard(
    name="",
    title="",
    port="posix",
    cpu=(),
    ram_bytes=256 * KIB,
    flash_bytes=1024 * KIB,
    payload_bytes=1024,
    ring_bytes=2048,
    stack_bytes=4 * KIB,
)
_NRF52 = replace(
    _LARGE,
    port="nrf5x",
    cpu=M4F,
    uart_interrupt=2,
    interrupts=48,
    page_bytes=4 * KIB,
    probe_target="nrf52840",
    uf2_family=0xADA52840,
)
_SMALL = replace(
    _LARGE,
    payload_bytes=512,
    ring_bytes=512,
    stack_bytes=1 * KIB,
    flash_bytes=256 * KIB,
    figures="mkr1000",
)
_NRF51 = replace(
    _SMALL,
    port="nrf5x",
    cpu=M0,
    ram_bytes=16 * KIB,
    uart_interrupt=2,
    defines={"PORT_PIN_TX": 24, "PORT_PIN_RX": 25},
)
_SAMD21 = replace(
    _SMALL,
    port="samd21",
    cpu=M0PLUS,
    ram_bytes=32 * KIB,
    flash_origin=0x2000,
    flash_reserved_bytes=0x2000,
    page_bytes=256,
    probe_target="atsamd21g18a",
    uf2_family=0x68ED2B88,
)
_STM32F4 = replace(
    _LARGE,
    port="stm32f4",
    cpu=M4F,
    ram_bytes=128 * KIB,
    flash_origin=0x0800_0000,
    page_bytes=128 * KIB,
    interrupts=82,
    uart_interrupt=37,
    defines={"PORT_EMULATED": 0, "PORT_USART": 1},
)
_NUCLEO_F446 = replace(
    _STM32F4,
    flash_bytes=512 * KIB,
    interrupts=97,
    uart_interrupt=38,
    defines={"PORT_EMULATED": 0, "PORT_USART": 2},
)


def _spi(select: int, clock: int, out: int, into: int, high: tuple[int, int] | None = None) -> dict[str, int]:
    """Return the pins of an SPI medium of an nRF52; `high`: those that must be high for a
    flash with four data lines.
    """
    first, second = high or (select, select)
    return {
        "PORT_PIN_SELECT": select,
        "PORT_PIN_SCK": clock,
        "PORT_PIN_MOSI": out,
        "PORT_PIN_MISO": into,
        "PORT_PIN_HIGH_1": first,
        "PORT_PIN_HIGH_2": second,
    }


def _mps2(name: str, core: str, cpu: tuple[str, ...], machine: str, storage: int) -> FirmwareBoard:
    return replace(
        _LARGE,
        name=name,
        title=f"simulated Cortex-{core}, 256 KiB RAM, 1 MiB flash",
        port="cmsdk",
        cpu=cpu,
        storage_origin=storage,
        methods=(FlashMethod.NONE,),
        machine=Machine(machine, storage_bytes=_PSRAM_BYTES),
        media={"psram": {"PORT_PSRAM_BYTES": _PSRAM_BYTES, "PORT_PAGE_BYTES_PER_S": 0}},
    )


BOARDS: tuple[FirmwareBoard, ...] = (
    _mps2("qemu-m4f", "M4F", M4F, "mps2-an386", 0x2100_0000),
    _mps2("qemu-m7f", "M7F", M7F, "mps2-an500", 0x6000_0000),
    _mps2("qemu-m3", "M3", M3, "mps2-an385", 0x2100_0000),
    replace(
        _NRF51, name="qemu-m0", title="simulated Cortex-M0 (nRF51822), 16 KiB RAM, 256 KiB flash",
        methods=(FlashMethod.NONE,), machine=Machine("microbit"),
    ),
    replace(
        _NRF51, name="qemu-m0-32k", title="simulated Cortex-M0 (nRF51822), 32 KiB RAM, 256 KiB flash",
        ram_bytes=32 * KIB, methods=(FlashMethod.NONE,),
        machine=Machine("microbit", ("-global", "nrf51-soc.sram-size=32768")),
    ),
    replace(
        _STM32F4, name="qemu-stm32f4", title="simulated STM32F405 (Cortex-M4F), 128 KiB RAM, 1 MiB flash",
        methods=(FlashMethod.NONE,), machine=Machine("netduinoplus2"), has_storage=False,
        defines={"PORT_EMULATED": 1, "PORT_USART": 1},
    ),
    replace(
        _NUCLEO_F446, name="qemu-nucleo-f446re", title="simulated Nucleo-F446RE, its serial port on an STM32F405",
        methods=(FlashMethod.NONE,), machine=Machine("netduinoplus2", ("-serial", "null")), has_storage=False,
        defines={"PORT_EMULATED": 1, "PORT_USART": 2},
    ),
    replace(
        _STM32F4, name="stm32f405", title="STM32F405 or F407 with a serial adapter on PA9 and PA10 (Cortex-M4F)",
        methods=(FlashMethod.STM32LOADER, FlashMethod.PYOCD), probe_target="stm32f407vg",
    ),
    replace(
        _NUCLEO_F446, name="nucleo-f446re", title="ST Nucleo-F446RE (Cortex-M4F), over its ST-LINK's USB",
        usb=(UsbId(0x0483, 0x374B), UsbId(0x0483, 0x3752)), methods=(FlashMethod.PYOCD,), probe_target="stm32f446retx",
    ),
    replace(
        _NRF51, name="microbit", title="BBC micro:bit v1 (nRF51822, Cortex-M0)", usb=(UsbId(0x0D28, 0x0204),),
        methods=(FlashMethod.DAPLINK, FlashMethod.PYOCD), probe_target="nrf51822",
    ),
    replace(
        _NRF52, name="nrf52840-dk", title="Nordic nRF52840 DK (Cortex-M4F)", methods=(FlashMethod.PYOCD,),
        usb=(UsbId(0x1366, 0x1015), UsbId(0x1366, 0x1051)), defines={"PORT_PIN_TX": 6, "PORT_PIN_RX": 8},
        media={"nor": _spi(17, 19, 20, 21, (22, 23))},
    ),
    replace(
        _NRF52, name="feather-nrf52840", title="Adafruit Feather nRF52840, UART on TX and RX pins",
        flash_origin=0x26000, flash_reserved_bytes=0x26000 + 0xC000, usb=(UsbId(0x239A, 0x8029), UsbId(0x239A, 0x0029)),
        methods=(FlashMethod.UF2, FlashMethod.NRFUTIL), defines={"PORT_PIN_TX": 25, "PORT_PIN_RX": 24},
        media={"nor": _spi(20, 19, 17, 22, (23, 21)), "sd": _spi(27, 14, 13, 15)},
    ),
    replace(
        _SAMD21, name="arduino-zero", title="Arduino Zero, programming port (SAMD21, Cortex-M0+)",
        usb=(UsbId(0x03EB, 0x2157),), methods=(FlashMethod.PYOCD, FlashMethod.BOSSAC), uart_interrupt=14,
        defines={"PORT_SERCOM": 5, "PORT_PIN_TX": 54, "PORT_PIN_RX": 55, "PORT_PIN_FUNCTION": 3, "PORT_PADS_TX": 1,
                 "PORT_PAD_RX": 3},
    ),
    replace(
        _SAMD21, name="feather-m0", title="Adafruit Feather M0 (SAMD21, Cortex-M0+), UART on TX and RX pins",
        usb=(UsbId(0x239A, 0x800B), UsbId(0x239A, 0x000B)), methods=(FlashMethod.UF2, FlashMethod.BOSSAC),
        uart_interrupt=9,
        defines={"PORT_SERCOM": 0, "PORT_PIN_TX": 10, "PORT_PIN_RX": 11, "PORT_PIN_FUNCTION": 2, "PORT_PADS_TX": 1,
                 "PORT_PAD_RX": 3},
    ),
    replace(
        _LARGE, name="pico", title="Raspberry Pi Pico (RP2040, Cortex-M0+), USB, or UART on GP0 and GP1", port="rp2040",
        cpu=M0PLUS, usb=(UsbId(0x2E8A, 0x000A),),
        flash_bytes=2048 * KIB, flash_origin=0x1000_0000, page_bytes=4 * KIB, interrupts=26, uart_interrupt=20,
        methods=(FlashMethod.BOOTSEL, FlashMethod.PYOCD), probe_target="rp2040", uf2_family=0xE48BFF56, figures="mkr1000",
    ),
    replace(
        _LARGE, name="posix", title="a process on this machine, with the limits of qemu-m4f",
        methods=(FlashMethod.NONE,), media={"psram": {}, "nor": {}, "sd": {}},
    ),
)  # fmt: skip


def find_board(name: str) -> FirmwareBoard:
    """Return the board called `name`; raise BoardJobError with the known names."""
    for board in BOARDS:
        if board.name == name:
            return board
    raise BoardJobError(f"there is no board {name!r}; the known boards are {', '.join(board.name for board in BOARDS)}")


def boards_with_usb(vendor: int, product: int) -> tuple[FirmwareBoard, ...]:
    """Return the boards whose serial port has this USB identity."""
    return tuple(board for board in BOARDS if UsbId(vendor, product) in board.usb)
