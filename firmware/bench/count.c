/* QEMU TCG plugin: instructions retired by the guest between markers, exactly.
 *
 * The marker is the guest instruction `mov r9, r9` (0x46c9), a no-op no compiler emits. Odd markers open a span, even ones
 * close it; each closed span prints "span <n> <instructions>", and with profile=1 the instructions per symbol follow.
 * Arguments: out=FILE, profile=0|1. Distributions ship QEMU without its plugin header, so the part of the version 1
 * interface used here is declared by hand (qemu/include/qemu/qemu-plugin.h, QEMU 4.2 and later).
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef void (*tb_callback)(qemu_plugin_id_t, struct qemu_plugin_tb *);
typedef void (*insn_callback)(unsigned int, void *);
typedef void (*exit_callback)(qemu_plugin_id_t, void *);
extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, tb_callback);
extern void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, insn_callback, enum qemu_plugin_cb_flags, void *);
extern void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, enum qemu_plugin_op, void *, uint64_t);
extern void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, exit_callback, void *);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
extern const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
extern size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
extern const char *qemu_plugin_insn_symbol(const struct qemu_plugin_insn *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

enum { MARKER = 0x46c9, NAME_BYTES = 96 };

typedef struct symbol {
    char name[NAME_BYTES];
    uint64_t count;
    struct symbol *next;
} symbol;

static uint64_t total, opened_at;
static unsigned markers;
static bool profile;
static FILE *out;
static symbol *symbols;

static symbol *find_symbol(const char *name) {
    if (!name) name = "?";
    for (symbol *s = symbols; s; s = s->next)
        if (!strncmp(s->name, name, NAME_BYTES - 1)) return s;
    symbol *s = calloc(1, sizeof *s);
    if (!s) abort();
    strncpy(s->name, name, NAME_BYTES - 1);
    s->next = symbols;
    return symbols = s;
}

static void on_marker(unsigned vcpu, void *unused) {
    (void)vcpu, (void)unused;
    if (markers++ % 2 == 0) {
        for (symbol *s = symbols; s; s = s->next) s->count = 0;
        opened_at = total;
        return;
    }
    fprintf(out, "span %u %" PRIu64 "\n", markers / 2 - 1, total - opened_at);
    for (symbol *s = profile ? symbols : 0; s; s = s->next)
        if (s->count) fprintf(out, "symbol %u %" PRIu64 " %s\n", markers / 2 - 1, s->count, s->name);
    fflush(out);
}

static void on_block(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(block, i);
        uint16_t opcode;
        memcpy(&opcode, qemu_plugin_insn_data(insn), sizeof opcode);
        if (qemu_plugin_insn_size(insn) == 2 && opcode == MARKER)
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_marker, QEMU_PLUGIN_CB_NO_REGS, 0);
        qemu_plugin_register_vcpu_insn_exec_inline(insn, QEMU_PLUGIN_INLINE_ADD_U64, &total, 1);
        if (profile)
            qemu_plugin_register_vcpu_insn_exec_inline(insn, QEMU_PLUGIN_INLINE_ADD_U64, &find_symbol(qemu_plugin_insn_symbol(insn))->count, 1);
    }
}

static void on_exit_(qemu_plugin_id_t id, void *unused) {
    (void)id, (void)unused;
    fprintf(out, "total %" PRIu64 "\n", total);
    fflush(out);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv) {
    (void)info;
    out = stderr;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "out=", 4)) out = fopen(argv[i] + 4, "w");
        if (!strncmp(argv[i], "profile=", 8)) profile = argv[i][8] == '1';
    }
    if (!out) return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_block);
    qemu_plugin_register_atexit_cb(id, on_exit_, 0);
    return 0;
}
