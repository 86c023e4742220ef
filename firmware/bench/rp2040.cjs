// Runs the bench program on rp2040js, an emulator of the Raspberry Pi Pico's RP2040 that shares no code with QEMU:
//   node rp2040.cjs PACKAGE IMAGE
// PACKAGE: the folder of the npm package rp2040js. IMAGE: the program as it lies in flash. Its semihosting calls are answered here.
'use strict';
const fs = require('fs');
const path = require('path');

const FLASH = 0x10000000, RAM = 0x20000000, SEMIHOSTING = 0xab;
const SYS_OPEN = 1, SYS_CLOSE = 2, SYS_WRITE = 5, SYS_READ = 6, SYS_EXIT = 0x18, EXIT_GOOD = 0x20026;

const [packageFolder, image] = process.argv.slice(2);
const { RP2040 } = require(path.join(packageFolder, 'dist', 'cjs', 'index.js'));
const chip = new RP2040();
const core = chip.core;
let exitStatus = null;

function text(address, length) {
  let found = '';
  for (let i = 0; i < length; i++) found += String.fromCharCode(chip.readUint8(address + i));
  return found;
}

// Bytes of RAM or flash, as a view.
function bytes(address, length) {
  const [memory, start] = address >= RAM ? [chip.sram, RAM] : [chip.flash, FLASH];
  return memory.subarray(address - start, address - start + length);
}

function answer(call, argument) {
  const words = [0, 1, 2].map((i) => (call === SYS_EXIT ? 0 : chip.readUint32(argument + 4 * i)));
  switch (call) {
    case SYS_OPEN: return fs.openSync(text(words[0], words[2]), words[1] >= 4 ? 'w' : 'r');
    case SYS_CLOSE: fs.closeSync(words[0]); return 0;
    case SYS_WRITE: return words[2] - fs.writeSync(words[0], bytes(words[1], words[2]));
    case SYS_READ: return words[2] - fs.readSync(words[0], bytes(words[1], words[2]), 0, words[2], null);
    case SYS_EXIT: exitStatus = argument === EXIT_GOOD ? 0 : 1; return 0;
    default: throw new Error(`semihosting call ${call} is not answered`);
  }
}

chip.onBreak = (code) => {
  if (code !== SEMIHOSTING) throw new Error(`break ${code} at ${core.PC.toString(16)}`);
  core.registers[0] = answer(core.registers[0], core.registers[1]);
};
chip.flash.set(fs.readFileSync(image));
core.VTOR = FLASH;
core.SP = chip.readUint32(FLASH);
core.PC = chip.readUint32(FLASH + 4) & ~1;
while (exitStatus === null) core.executeInstruction();
process.exit(exitStatus);
