/* Backward of convolution and classifier. Every sum starts at +0 and runs in the order of its comment; the 4x4 tiles only
 * keep sixteen such sums in registers at once, so a tile and its plain loop give the same bits.
 */
#include "geometry.h"
#include "kernels.h"
#include "update.h"

enum { TILE = PORT_GROUP };

/* Output positions whose tap `offset` of the kernel falls inside the input. */
typedef struct span {
    int32_t first, last;
} span;

static span touching(int32_t tap, int32_t stride, int32_t pad, int32_t in, int32_t out) {
    span range;
    int32_t low = pad - tap, high = in + pad - tap; /* low <= position * stride < high */
    range.first = low <= 0 ? 0 : (low + stride - 1) / stride;
    range.last = high <= 0 ? 0 : (high + stride - 1) / stride;
    if (range.last > out) range.last = out;
    if (range.first > range.last) range.first = range.last;
    return range;
}

static span within_band(span range, int32_t first, int32_t last) {
    if (range.first < first) range.first = first;
    if (range.last > last) range.last = last;
    if (range.first > range.last) range.first = range.last;
    return range;
}

/* ---- gradient of the input --------------------------------------------------------------------------------------- */

static float store(float *target, float sum, int accumulate) { return *target = accumulate ? *target + sum : sum; }

/* Four neighbouring pixels times four channels: sum over o of (dy[o] * scale[o]) * w[o][c]. */
static void input_tile(const port_bound *bound, const float *dy, float *dx, int32_t c, int accumulate) {
    const port_op *op = bound->op;
    int32_t out_c = op->out_c, in_c = op->in_c;
    float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    const float *p0 = dy, *p1 = dy + out_c, *p2 = dy + 2 * out_c, *p3 = dy + 3 * out_c, *scale = op->weight_scale;
    for (int segment = 0; segment < 2; segment++) {
        const int8_t *w = (segment ? bound->frozen : bound->trained) + c;
        int32_t rows = segment ? out_c - op->trained_rows : op->trained_rows;
        for (; rows > 0; rows--, w += in_c) {
            float s = *scale++, g0 = *p0++ * s, g1 = *p1++ * s, g2 = *p2++ * s, g3 = *p3++ * s;
#if PORT_SKIP_ZERO_GRADIENTS
            if (g0 == 0.0f && g1 == 0.0f && g2 == 0.0f && g3 == 0.0f) continue;
#endif
            float w0 = (float)w[0], w1 = (float)w[1], w2 = (float)w[2], w3 = (float)w[3];
            a0 += g0 * w0, a1 += g0 * w1, a2 += g0 * w2, a3 += g0 * w3;
            b0 += g1 * w0, b1 += g1 * w1, b2 += g1 * w2, b3 += g1 * w3;
            c0 += g2 * w0, c1 += g2 * w1, c2 += g2 * w2, c3 += g2 * w3;
            d0 += g3 * w0, d1 += g3 * w1, d2 += g3 * w2, d3 += g3 * w3;
        }
    }
    store(dx, a0, accumulate), store(dx + 1, a1, accumulate), store(dx + 2, a2, accumulate), store(dx + 3, a3, accumulate);
    dx += in_c;
    store(dx, b0, accumulate), store(dx + 1, b1, accumulate), store(dx + 2, b2, accumulate), store(dx + 3, b3, accumulate);
    dx += in_c;
    store(dx, c0, accumulate), store(dx + 1, c1, accumulate), store(dx + 2, c2, accumulate), store(dx + 3, c3, accumulate);
    dx += in_c;
    store(dx, d0, accumulate), store(dx + 1, d1, accumulate), store(dx + 2, d2, accumulate), store(dx + 3, d3, accumulate);
}

/* Adds one tap's rows o = first .. first + rows - 1 to `sum`; w is row `first` at that tap and channel. */
static float add_rows(float sum, const float *dy, const float *scale, const int8_t *w, int32_t rows, int32_t row_bytes) {
    for (int32_t o = 0; o < rows; o++, w += row_bytes) {
        float g = dy[o] * scale[o];
#if PORT_SKIP_ZERO_GRADIENTS
        if (g == 0.0f) continue;
#endif
        sum += g * (float)*w;
    }
    return sum;
}

/* One input value: sum over the taps (u, v), then o, of (dy[o] * scale[o]) * w[o][u][v][c]. */
static float input_value(const port_bound *bound, const float *gradient, int32_t y, int32_t x, int32_t c) {
    const port_op *op = bound->op;
    int32_t row_bytes = op->kernel_h * op->kernel_w * op->in_c, trained = op->trained_rows;
    float sum = 0.0f;
    for (int32_t u = 0; u < op->kernel_h; u++) {
        int32_t i = y + op->pad_top - u;
        if (i < 0 || i % op->stride_h || i / op->stride_h >= op->out_h) continue;
        for (int32_t v = 0; v < op->kernel_w; v++) {
            int32_t j = x + op->pad_left - v, tap = (u * op->kernel_w + v) * op->in_c + c;
            if (j < 0 || j % op->stride_w || j / op->stride_w >= op->out_w) continue;
            const float *dy = gradient + ((i / op->stride_h) * op->out_w + j / op->stride_w) * op->out_c;
            if (trained) sum = add_rows(sum, dy, op->weight_scale, bound->trained + tap, trained, row_bytes);
            if (trained < op->out_c)
                sum = add_rows(sum, dy + trained, op->weight_scale + trained, bound->frozen + tap, op->out_c - trained, row_bytes);
        }
    }
    return sum;
}

void port_conv_input_gradient(const port_bound *bound, const float *gradient, float *target, int accumulate) {
    const port_op *op = bound->op;
    int32_t start = bound->first * op->in_w, pixels = bound->last * op->in_w, in_c = op->in_c, tiled_pixels = start, tiled_c = 0;
    if (port_is_pointwise(op)) {
        tiled_pixels = pixels - (pixels - start) % TILE;
        tiled_c = in_c - in_c % TILE;
    }
    for (int32_t p = start; p < tiled_pixels; p += TILE)
        for (int32_t c = 0; c < tiled_c; c += TILE)
            input_tile(bound, gradient + p * op->out_c, target + p * in_c + c, c, accumulate);
    for (int32_t p = tiled_c < in_c ? start : tiled_pixels; p < pixels; p++)
        for (int32_t c = p < tiled_pixels ? tiled_c : 0; c < in_c; c++)
            store(target + p * in_c + c, input_value(bound, gradient, p / op->in_w, p % op->in_w, c), accumulate);
}

/* ---- gradient and update of the weights -------------------------------------------------------------------------- */

/* The output pixels that one tap sums over: `rows` runs of `columns`, with the steps between neighbours. */
typedef struct walk {
    const float *dy;
    const int8_t *x;
    int32_t rows, columns;
    int32_t dy_column, x_column, dy_row, x_row;
} walk;

static walk walk_tap(const port_bound *bound, const float *gradient, int32_t u, int32_t v) {
    const port_op *op = bound->op;
    span vertical = within_band(touching(u, op->stride_h, op->pad_top, op->in_h, op->out_h), bound->first, bound->last);
    span horizontal = touching(v, op->stride_w, op->pad_left, op->in_w, op->out_w);
    walk w;
    int32_t y = vertical.first * op->stride_h + u - op->pad_top, x = horizontal.first * op->stride_w + v - op->pad_left;
    w.dy = gradient + (vertical.first * op->out_w + horizontal.first) * op->out_c;
    w.x = bound->in + (y * op->in_w + x) * op->in_c;
    w.rows = vertical.last - vertical.first, w.columns = horizontal.last - horizontal.first;
    w.dy_column = op->out_c, w.x_column = op->stride_w * op->in_c;
    w.dy_row = op->out_w * op->out_c, w.x_row = op->stride_h * op->in_w * op->in_c;
    if (port_is_pointwise(op)) w.columns *= w.rows, w.rows = w.columns ? 1 : 0;
    return w;
}

/* to[a][b] = from[a][b] + the sum over the pixels, row by row, of dy[o + a] * (x[c + b] - zero), for a full 4x4 tile.
 * `from` null: 0. Compiled separately for each case, so that a step without bands has no overhead. */
static inline __attribute__((always_inline)) void sum_tile(
    const walk *w, int32_t o, int32_t c, int32_t zero, const float *from, int32_t from_row, float *to, int32_t to_row) {
    float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
    float c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
    if (from) {
        a0 = from[0], a1 = from[1], a2 = from[2], a3 = from[3], from += from_row;
        b0 = from[0], b1 = from[1], b2 = from[2], b3 = from[3], from += from_row;
        c0 = from[0], c1 = from[1], c2 = from[2], c3 = from[3], from += from_row;
        d0 = from[0], d1 = from[1], d2 = from[2], d3 = from[3];
    }
    for (int32_t row = 0; row < w->rows; row++) {
        const float *dy = w->dy + row * w->dy_row + o;
        const int8_t *x = w->x + row * w->x_row + c;
        for (int32_t left = w->columns; left > 0; left--, dy += w->dy_column, x += w->x_column) {
            float g0 = dy[0], g1 = dy[1], g2 = dy[2], g3 = dy[3];
#if PORT_SKIP_ZERO_GRADIENTS
            if (g0 == 0.0f && g1 == 0.0f && g2 == 0.0f && g3 == 0.0f) continue;
#endif
            float x0 = (float)(x[0] - zero), x1 = (float)(x[1] - zero), x2 = (float)(x[2] - zero), x3 = (float)(x[3] - zero);
            a0 += g0 * x0, a1 += g0 * x1, a2 += g0 * x2, a3 += g0 * x3;
            b0 += g1 * x0, b1 += g1 * x1, b2 += g1 * x2, b3 += g1 * x3;
            c0 += g2 * x0, c1 += g2 * x1, c2 += g2 * x2, c3 += g2 * x3;
            d0 += g3 * x0, d1 += g3 * x1, d2 += g3 * x2, d3 += g3 * x3;
        }
    }
    to[0] = a0, to[1] = a1, to[2] = a2, to[3] = a3, to += to_row;
    to[0] = b0, to[1] = b1, to[2] = b2, to[3] = b3, to += to_row;
    to[0] = c0, to[1] = c1, to[2] = c2, to[3] = c3, to += to_row;
    to[0] = d0, to[1] = d1, to[2] = d2, to[3] = d3;
}

static void weight_tile(const walk *w, int32_t o, int32_t c, int32_t zero, float sums[TILE][TILE]) {
    sum_tile(w, o, c, zero, 0, 0, &sums[0][0], TILE);
}

/* One of the same sums, for the edges of the weight matrix. */
static float weight_value(const walk *w, int32_t o, int32_t c, int32_t zero, float sum) {
    for (int32_t row = 0; row < w->rows; row++) {
        const float *dy = w->dy + row * w->dy_row + o;
        const int8_t *x = w->x + row * w->x_row + c;
        for (int32_t left = w->columns; left > 0; left--, dy += w->dy_column, x += w->x_column) {
#if PORT_SKIP_ZERO_GRADIENTS
            if (*dy == 0.0f) continue;
#endif
            sum += *dy * (float)(*x - zero);
        }
    }
    return sum;
}

/* The sums of a tile of a band: loaded from the previous band's results and stored for the next. */
static __attribute__((noinline)) void band_tile(
    const port_bound *bound, const walk *w, int32_t o, int32_t tap, int32_t c, int32_t rows, int32_t columns, float sums[TILE][TILE]) {
    const port_op *op = bound->op;
    int32_t row_bytes = op->kernel_h * op->kernel_w * op->in_c, corner = o * row_bytes + tap * op->in_c + c;
    const float *from = bound->resumed ? bound->resumed + corner : 0;
    float *to = bound->suspended ? bound->suspended + corner : &sums[0][0];
    int32_t to_row = bound->suspended ? row_bytes : TILE;
    if (rows < TILE || columns < TILE) {
        for (int32_t a = 0; a < rows; a++)
            for (int32_t b = 0; b < columns; b++)
                to[a * to_row + b] = weight_value(w, o + a, c + b, op->in_zero, from ? from[a * row_bytes + b] : 0.0f);
    } else if (from) {
        sum_tile(w, o, c, op->in_zero, from, row_bytes, to, to_row);
    } else {
        sum_tile(w, o, c, op->in_zero, 0, 0, to, to_row);
    }
}

/* Updates the tile's weights in the order a, b: the order in which random numbers are drawn. */
static void update_tile(const port_bound *bound, const walk *w, int32_t o, int32_t tap, int32_t c, port_update *update) {
    const port_op *op = bound->op;
    int32_t row_bytes = op->kernel_h * op->kernel_w * op->in_c;
    int32_t rows = op->trained_rows - o < TILE ? op->trained_rows - o : TILE, columns = op->in_c - c < TILE ? op->in_c - c : TILE;
    float sums[TILE][TILE];
    if (bound->resumed || bound->suspended) {
        band_tile(bound, w, o, tap, c, rows, columns, sums);
        if (bound->suspended) return;
    } else if (rows == TILE && columns == TILE) {
        weight_tile(w, o, c, op->in_zero, sums);
    } else {
        for (int32_t a = 0; a < rows; a++)
            for (int32_t b = 0; b < columns; b++) sums[a][b] = weight_value(w, o + a, c + b, op->in_zero, 0.0f);
    }
    port_update local = *update; /* in registers: for the compiler, a store to an int8_t might change *update */
    for (int32_t a = 0; a < rows; a++) {
        float size = port_step_size(&local, op->weight_scale[o + a]) * op->in_scale;
        int32_t at = (o + a) * row_bytes + tap * op->in_c + c;
        for (int32_t b = 0; b < columns; b++, at++)
            port_apply_weight(&local, bound, at, size * sums[a][b]);
    }
    update->generator = local.generator;
}

void port_conv_weight_update(const port_bound *bound, const float *gradient, const float *groups, port_update *update) {
    const port_op *op = bound->op;
    for (int32_t u = 0; u < op->kernel_h; u++) {
        for (int32_t v = 0; v < op->kernel_w; v++) {
            walk w = walk_tap(bound, gradient, u, v);
            for (int32_t o = 0; o < op->trained_rows; o += TILE) {
                if (groups && groups[o / TILE] != PORT_CHOSEN) {
                    int32_t rows = op->trained_rows - o < TILE ? op->trained_rows - o : TILE;
                    port_skip_draws(&update->generator, (uint32_t)(rows * op->in_c));
                    continue;
                }
                for (int32_t c = 0; c < op->in_c; c += TILE) update_tile(bound, &w, o, u * op->kernel_w + v, c, update);
            }
        }
    }
}

/* ---- bias, of convolution, depthwise and classifier alike -------------------------------------------------------- */

void port_bias_update(const port_bound *bound, const float *gradient, port_update *update) {
    const port_op *op = bound->op;
    int32_t pixels = (bound->last - bound->first) * op->out_w;
    gradient += bound->first * op->out_w * op->out_c;
    for (int32_t o = 0; o < op->out_c; o++) {
        float sum = bound->resumed ? bound->resumed[o] : 0.0f;
        for (int32_t p = 0; p < pixels; p++) sum += gradient[p * op->out_c + o];
        if (bound->suspended) {
            bound->suspended[o] = sum;
            continue;
        }
        port_apply_bias(update, bound, o, op->in_scale * op->weight_scale[o], sum);
    }
}
