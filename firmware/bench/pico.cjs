// Runs the firmware on rp2040js as a Raspberry Pi Pico would, from its boot on:
//   node pico.cjs PACKAGE FLASH LINE uart|usb
// PACKAGE: the folder of the npm package rp2040js. FLASH: a file with the content of the flash, which keeps what the
// firmware writes. LINE: an open descriptor, the other end of UART0 or of the serial port over USB. The Pico goes off
// when the standard input ends.
//
// rp2040js has neither the chip's boot ROM nor its reset. Here are the parts of the ROM that the data sheet promises
// (2.8): the second stage is checked, copied to RAM and run, and flash functions are found by their codes. They insist
// on what a real chip needs: no execution from a flash that cannot be read, bits that only an erase sets.
'use strict';
const fs = require('fs');
const path = require('path');

const FLASH = 0x10000000, RAM = 0x20000000, BOOT_STAGE = 0x20041f00, BOOT_BYTES = 252, SECTOR = 4096, PAGE = 256;
const ROM_FUNCTIONS = 0x100, CORE_NS = 8;
const SSI_DATA = 0x60, SELECT = 0xc, READ_ID = 0x4b, FLASH_ID = [0xe6, 0x60, 0x58, 0x38, 0x83, 0x4f, 0x2c, 0x31];
const CONTROL_IN = 0x80, CONTROL_OUT = 0x84, DATA_IN = 0x90, DATA_OUT = 0x94, USB_AVAILABLE = 1 << 10, USB_ODD = 1 << 13;
const INSTRUCTIONS_A_TURN = 100000, INSTRUCTIONS_A_BYTE = 1000;
const RESET_CONTROL = 0xd0c, RESET_REQUEST = 4, SSI = 0x18000, FLASH_PINS = 0x40018, SSI_ENABLE = 8, WATCHDOG = 0x40058;

const [packageFolder, flashFile, lineDescriptor, connection] = process.argv.slice(2);
const LINE = Number(lineDescriptor);
const { RP2040, USBCDC } = require(path.join(packageFolder, 'dist', 'cjs', 'index.js'));
const chip = new RP2040();
const { core, clock } = chip;
const uart = chip.uart[0];
const content = fs.openSync(flashFile, 'r+');
const quiet = () => {};
const ssi = chip.peripherals[SSI];
let flashSelected = false;
let flashReadable = false, resetAsked = false, waitForAlarm = null;
let received = [], sent = [], deliver = null, toggles = {}, exchanged = [];

function insist(condition, message) {
  if (!condition) throw new Error(`${message} (called from 0x${core.LR.toString(16)})`);
}

// CRC-32/MPEG-2
function checksum(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) {
    crc ^= byte << 24;
    for (let bit = 0; bit < 8; bit++) crc = crc & 0x80000000 ? (crc << 1) ^ 0x04c11db7 : crc << 1;
  }
  return crc >>> 0;
}

// Check what every change of the flash needs; keep it in the file.
function change(offset, size, unit, write) {
  insist(!flashReadable, 'the flash is changed while the program may run from it');
  insist(core.PM, 'the flash is changed with interrupts on');
  insist(core.LR >>> 0 >= RAM, 'the flash is changed by a function that lies in it');
  insist(offset % unit === 0 && size % unit === 0, `${size} B at ${offset} are no multiple of ${unit}`);
  write(chip.flash.subarray(offset, offset + size));
  fs.writeSync(content, chip.flash, offset, size, offset);
}

const romFunctions = {
  find: (_table, code) => {
    const index = Object.keys(romFunctions).indexOf(String.fromCharCode(code & 0xff, code >> 8));
    return index < 0 ? 0 : (ROM_FUNCTIONS + 4 * index) | 1;
  },
  IF: quiet,
  EX: () => { flashReadable = false; },
  RE: (offset, size) => change(offset, size, SECTOR, (part) => part.fill(0xff)),
  RP: (offset, from, size) => change(offset, size, PAGE, (part) => {
    insist(from >>> 0 >= RAM, 'the bytes to write lie in the flash');
    for (let i = 0; i < size; i++) part[i] &= chip.readUint8(from + i);
  }),
  FC: quiet,
};

function makeRom() {
  const find = (ROM_FUNCTIONS | 1);
  chip.bootrom[0x14 / 4] = 0x0040; // the table of functions; only `find` reads it
  chip.bootrom[0x18 / 4] = find;
  Object.keys(romFunctions).forEach((_name, index) => {
    chip.bootrom[ROM_FUNCTIONS / 4 + index] = (0x4770 << 16) | 0xbe00 | index; // bkpt index, bx lr
  });
}

// The flash chip's answer to one byte: it knows only the command for its number, five bytes ahead of it.
function exchange(byte) {
  insist(!flashReadable && core.PM, 'the flash chip is asked while the program may run from it');
  insist(flashSelected, 'the flash chip is not selected');
  exchanged.push(byte);
  insist(exchanged[0] === READ_ID, `the flash chip does not know command ${exchanged[0]}`);
  ssi.dr0 = FLASH_ID[exchanged.length - 6] ?? 0;
  return true;
}

function select(value) {
  flashSelected = (value & 0x300) === 0x200;
  exchanged = [];
  return true;
}

// A host that enumerates the Pico anew and gives it what was received, a packet at a time.
function plugIn() {
  const host = new USBCDC(chip.usbCtrl);
  toggles = { [CONTROL_IN]: true, [CONTROL_OUT]: true, [DATA_IN]: false, [DATA_OUT]: false };
  let room = 0;
  deliver = () => {
    if (room === 0 || received.length === 0) return;
    chip.usbCtrl.endpointReadDone(host.outEndpoint, Uint8Array.from(received.splice(0, room)));
    room = 0;
  };
  chip.usbCtrl.onEndpointRead = (endpoint, size) => { if (endpoint === host.outEndpoint) room = size; };
  host.onSerialData = (bytes) => sent.push(...bytes);
}

// rp2040js takes any packet; a host drops one whose toggle (DATA0, DATA1) is not the next.
function watchToggles() {
  const update = chip.usbCtrl.DPRAMUpdated.bind(chip.usbCtrl), setup = chip.usbCtrl.sendSetupPacket.bind(chip.usbCtrl);
  chip.usbCtrl.DPRAMUpdated = (offset, value) => {
    if (value & USB_AVAILABLE && offset in toggles) {
      insist(((value & USB_ODD) !== 0) === toggles[offset], `the buffer of ${offset.toString(16)} has the wrong toggle`);
      toggles[offset] = !toggles[offset];
    }
    update(offset, value);
  };
  chip.usbCtrl.sendSetupPacket = (packet) => {
    toggles[CONTROL_IN] = toggles[CONTROL_OUT] = true;
    setup(packet);
  };
}

function feedUart() {
  if (received.length && !uart.rxFIFO.full) uart.feedByte(received.shift());
}

function boot() {
  core.reset();
  chip.ppb.reset();
  Object.assign(core, { enabledInterrupts: 0, pendingInterrupts: 0, pendingSystick: false, waiting: false });
  Object.assign(core, { VTOR: 0, PM: false, IPSR: 0, currentMode: 0, SPSEL: 0 });
  insist(checksum(chip.flash.subarray(0, BOOT_BYTES)) === chip.readUint32(FLASH + BOOT_BYTES), 'the second stage has another checksum');
  chip.sram.set(chip.flash.subarray(0, BOOT_BYTES + 4), BOOT_STAGE - RAM);
  resetAsked = flashReadable = false;
  if (connection === 'usb') plugIn();
  core.SP = BOOT_STAGE;
  core.LR = 0;
  core.PC = BOOT_STAGE;
}

function watchRegister(peripheral, offset, notice) {
  const write = peripheral.writeUint32.bind(peripheral);
  peripheral.writeUint32 = (at, value) => (at === offset && notice(value) ? undefined : write(at, value));
}

function wake() {
  clearTimeout(waitForAlarm);
  waitForAlarm = null;
  core.waiting = false;
  run();
}

function run() {
  for (let i = 0; i < INSTRUCTIONS_A_TURN && !core.waiting; i++) {
    if (i % INSTRUCTIONS_A_BYTE === 0) deliver();
    insist(flashReadable || core.PC >>> 0 >= RAM || core.PC < FLASH, 'the program runs from a flash that cannot be read');
    clock.tick(core.executeInstruction() * CORE_NS);
    if (resetAsked) boot();
  }
  if (sent.length) fs.writeSync(LINE, Buffer.from(sent.splice(0)));
  if (!core.waiting || received.length) {
    core.waiting = false;
    setImmediate(run);
  } else {
    const pause = clock.nanosToNextAlarm;
    waitForAlarm = setTimeout(() => { clock.tick(pause); wake(); }, pause / 1e6);
  }
}

chip.logger = { debug: quiet, info: quiet, warn: quiet, error: quiet };
chip.onBreak = (index) => {
  const [first, second, third] = core.registers;
  core.registers[0] = Object.values(romFunctions)[index](first, second, third) ?? 0;
};
chip.flash.set(fs.readFileSync(content));
makeRom();
watchToggles();
watchRegister(chip.ppb, RESET_CONTROL, (value) => (resetAsked = (value & RESET_REQUEST) !== 0));
watchRegister(ssi, SSI_ENABLE, (value) => { flashReadable = value === 1; });
watchRegister(ssi, SSI_DATA, exchange);
watchRegister(chip.peripherals[FLASH_PINS], SELECT, select);
chip.peripherals[WATCHDOG].onWatchdogTrigger = () => { resetAsked = true; };
if (connection === 'uart') {
  deliver = feedUart;
  uart.onByte = (byte) => sent.push(byte);
}
fs.createReadStream('', { fd: LINE }).on('data', (bytes) => {
  received.push(...bytes);
  if (waitForAlarm !== null) wake();
});
process.stdin.on('end', () => process.exit(0)).resume();
boot();
run();
