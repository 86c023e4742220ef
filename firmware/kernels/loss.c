/* Softmax cross entropy with its own exp and log, because the C library's differ from core to core; mean squared error. */
#include <string.h>

#include "kernels.h"

static float power_of_two(int32_t exponent) { /* -126 .. 127 */
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* exp of x <= 0: x = k ln 2 + r, |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite), Taylor to r^6. */
float port_exp_negative(float x) {
    if (!(x > -80.0f)) return 0.0f;
    int32_t k = (int32_t)(x * 1.44269504f - 0.5f);
    float r = x - (float)k * 0.693359375f;
    r = r + (float)k * 2.12194440e-4f;
    float p = 0.00833333333f + r * 0.00138888889f;
    p = 0.0416666667f + r * p;
    p = 0.166666667f + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * p;
    p = 1.0f + r * p;
    return p * power_of_two(k);
}

/* log of a finite x >= 1: x = 2^k m, m in [1, 2), then 2 atanh((m - 1) / (m + 1)). */
static float log_at_least_one(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t k = (int32_t)(bits >> 23) - 127;
    bits = (bits & 0x007FFFFFu) | 0x3F800000u;
    float m;
    memcpy(&m, &bits, sizeof m);
    float s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    float p = 0.111111111f + s2 * 0.0909090909f;
    p = 0.142857143f + s2 * p;
    p = 0.2f + s2 * p;
    p = 0.333333333f + s2 * p;
    p = 1.0f + s2 * p;
    return (float)k * 0.693147181f + 2.0f * s * p;
}

static float largest(const float *logits, uint16_t count) {
    float top = logits[0];
    for (uint16_t i = 1; i < count; i++)
        if (logits[i] > top) top = logits[i];
    return top;
}

float port_loss(const float *logits, uint16_t count, uint16_t label) {
    float top = largest(logits, count), sum = 0.0f;
    for (uint16_t i = 0; i < count; i++) sum += port_exp_negative(logits[i] - top);
    return log_at_least_one(sum) - (logits[label] - top);
}

float port_loss_gradient(float *logits, uint16_t count, uint16_t label) {
    float top = largest(logits, count), of_label = logits[label] - top, sum = 0.0f;
    for (uint16_t i = 0; i < count; i++) {
        logits[i] = port_exp_negative(logits[i] - top);
        sum += logits[i];
    }
    float inverse = 1.0f / sum;
    for (uint16_t i = 0; i < count; i++) logits[i] *= inverse;
    logits[label] -= 1.0f;
    return log_at_least_one(sum) - of_label;
}

float port_squared_error(const float *outputs, const float *targets, uint16_t count) {
    float sum = 0.0f;
    for (uint16_t i = 0; i < count; i++) {
        float difference = outputs[i] - targets[i];
        sum += difference * difference;
    }
    return sum / (float)count;
}

float port_squared_error_gradient(float *outputs, const float *targets, uint16_t count) {
    float loss = port_squared_error(outputs, targets, count), share = 2.0f / (float)count;
    for (uint16_t i = 0; i < count; i++) outputs[i] = (outputs[i] - targets[i]) * share;
    return loss;
}
