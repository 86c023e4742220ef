/* The first 256 bytes of the flash, which the boot ROM copies to RAM, checks and runs: they let the program be executed
 * from the flash.
 *
 * Source: RP2040 Datasheet, boot sequence 2.8.1, second stage 2.8.1.3.1, SSI 4.10. Standard 03h reads of 32 bits at a
 * quarter of the core clock, which every flash chip knows. Called with a return address, as after a write to the flash,
 * it goes back there; with 0, as by the boot ROM, it starts the program after itself. */
__asm__(".section .boot, \"ax\", %progbits\n"
        ".syntax unified\n"
        ".thumb\n"
        ".balign 4\n"
        "boot_begin:\n"
        "    push {lr}\n"
        "    ldr r3, =0x18000000\n" /* the SSI */
        "    movs r1, #0\n"
        "    str r1, [r3, #0x08]\n" /* SSIENR: off, its settings cannot be changed otherwise */
        "    movs r1, #4\n"
        "    str r1, [r3, #0x14]\n" /* BAUDR: the divider */
        "    ldr r1, =0x001F0300\n" /* CTRLR0: one line, 32 bits, send command and address, then receive */
        "    str r1, [r3, #0x00]\n"
        "    ldr r1, =0x03000218\n" /* SPI_CTRLR0: command 03h of 8 bits, an address of 24 bits */
        "    ldr r0, =0x180000F4\n"
        "    str r1, [r0]\n"
        "    movs r1, #0\n"
        "    str r1, [r3, #0x04]\n" /* CTRLR1: one word each */
        "    movs r1, #1\n"
        "    str r1, [r3, #0x08]\n"
        "    pop {r0}\n"
        "    cmp r0, #0\n"
        "    beq 1f\n"
        "    bx r0\n"
        "1:  ldr r0, =0x10000100\n"
        "    ldr r1, =0xE000ED08\n"
        "    str r0, [r1]\n" /* VTOR */
        "    ldmia r0, {r0, r1}\n"
        "    msr msp, r0\n"
        "    bx r1\n"
        "    .ltorg\n"
        "    .space 252 - (. - boot_begin)\n"
        "    .word 0x0D21EC2C\n" /* CRC-32/MPEG-2 of the bytes before it, without which the ROM does not run them; a test holds it */
        ".text\n");
