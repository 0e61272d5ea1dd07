/* CPU decode kernel: small-batch GEMM, the layers built from it, and a decoding step of a Llama.
 *
 * A decoding step reads every weight once and computes little. In torch it is some hundred operations, whose overhead
 * exceeds their work: the weights have evicted everything else from the caches. Here they are a few calls that run at
 * memory bandwidth. native.py compiles this file; without a compiler torch computes the same. The OpenMP threads are
 * those of torch.
 */
#include <math.h>
#include <string.h>

#define SMALL 16384 /* elements of a matrix that one thread reads before others wake up */
/* Consecutive rows of a matrix that are multiplied together, since sequential reads are fastest, and how many such
 * blocks a thread takes at once: threads that other programs slow down take fewer. */
#define BLOCK 32
#define BLOCKS 4

typedef struct {
    const float *matrix, *bias; /* (outputs, inputs), (outputs) or none */
    long outputs, inputs;
} Linear;

typedef struct {
    const float *norm, *project, *output, *mlp_norm, *gate_up, *down;
    float *keys, *values; /* (sequences, key-value heads, capacity, head size) */
} LlamaLayer;

typedef struct {
    long layers, size, inner, heads, shared, width; /* H, MLP size, query heads, key-value heads, head size */
    float eps, scale;
    const float *norm;
} Llama;

static float dot(const float *a, const float *b, long count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static float output(Linear linear, long i, const float *row) {
    return dot(linear.matrix + i * linear.inputs, row, linear.inputs) + (linear.bias ? linear.bias[i] : 0);
}

static long least(long a, long b) { return a < b ? a : b; }

static float silu(float x) { return x / (1 + expf(-x)); }

/* The functions below are called by all threads of a team, each of which computes its part of `count` rows. */

static void rms_norm(const float *rows, const float *weight, float *normed, long count, long size, float eps) {
    for (long row = 0; row < count; row++, rows += size, normed += size) {
        float scale = 1 / sqrtf(dot(rows, rows, size) / size + eps);
#pragma omp for schedule(static) nowait
        for (long i = 0; i < size; i++) normed[i] = rows[i] * scale * weight[i];
    }
#pragma omp barrier
}

static void layer_norm(const float *rows, const float *weight, const float *bias, float *normed, long count, long size,
                       float eps) {
    for (long row = 0; row < count; row++, rows += size, normed += size) {
        float mean = 0, variance = 0;
#pragma omp simd reduction(+ : mean)
        for (long i = 0; i < size; i++) mean += rows[i] / size;
#pragma omp simd reduction(+ : variance)
        for (long i = 0; i < size; i++) variance += (rows[i] - mean) * (rows[i] - mean) / size;
        float scale = 1 / sqrtf(variance + eps);
#pragma omp for schedule(static) nowait
        for (long i = 0; i < size; i++) normed[i] = (rows[i] - mean) * scale * weight[i] + bias[i];
    }
#pragma omp barrier
}

/* rows @ matrix.T + bias, plus `before` if it is given */
static void product(Linear linear, const float *rows, const float *before, float *result, long count) {
    long outputs = linear.outputs;
#pragma omp for schedule(dynamic, BLOCKS)
    for (long first = 0; first < outputs; first += BLOCK)
        for (long row = 0; row < count; row++) {
            const float *of = rows + row * linear.inputs, *sums = before ? before + row * outputs : 0;
            float *to = result + row * outputs;
            for (long i = first; i < least(first + BLOCK, outputs); i++)
                to[i] = output(linear, i, of) + (sums ? sums[i] : 0);
        }
}

static void silu_product(Linear linear, const float *rows, const float *before, float *result, long count) {
    product(linear, rows, before, result, count);
#pragma omp for schedule(static)
    for (long i = 0; i < count * linear.outputs; i++) result[i] = silu(result[i]);
}

/* silu(gate(row))·up(row) */
static void gated_product(Linear gate, Linear up, const float *rows, float *result, long count) {
    long outputs = gate.outputs;
#pragma omp for schedule(dynamic, BLOCKS)
    for (long first = 0; first < outputs; first += BLOCK)
        for (long row = 0; row < count; row++) {
            const float *of = rows + row * gate.inputs;
            float *to = result + row * outputs;
            for (long i = first; i < least(first + BLOCK, outputs); i++) to[i] = silu(output(gate, i, of));
            for (long i = first; i < least(first + BLOCK, outputs); i++) to[i] *= output(up, i, of);
        }
}

static void rotate(float *head, const float *cosines, const float *sines, long width) {
    long half = width / 2;
    for (long i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

/* Softmax attention in one pass: sums are rescaled when a larger score appears. */
static void attend(const float *query, const float *keys, const float *values, float *result, long length, long width,
                   float scale) {
    float largest = -INFINITY, sum = 0;
    memset(result, 0, width * sizeof(float));
    for (long at = 0; at < length; at++) {
        float product = dot(query, keys + at * width, width) * scale;
        if (product > largest) {
            float less = expf(largest - product);
            for (long i = 0; i < width; i++) result[i] *= less;
            sum *= less;
            largest = product;
        }
        float weight = expf(product - largest);
        for (long i = 0; i < width; i++) result[i] += weight * values[at * width + i];
        sum += weight;
    }
    for (long i = 0; i < width; i++) result[i] /= sum;
}

/* One position of each sequence through all layers and the final norm: states (sequences, H), in place. Its keys and
 * values go to place `next` of the sequence, and it attends to all places from `first` to there. Cosines and sines:
 * (sequences, head size). scratch: H + (heads + 2·shared + heads)·width + inner elements per sequence. */
void calm_llama_step(const Llama *llama, const LlamaLayer *layers, float *states, const float *cosines,
                     const float *sines, const long *first, const long *next, long sequences, long capacity,
                     float *scratch, int threads) {
    long size = llama->size, width = llama->width, heads = llama->heads, shared = llama->shared, inner = llama->inner;
    long all = (heads + 2 * shared) * width;
    float *normed = scratch, *projected = normed + sequences * size, *attended = projected + sequences * all;
    float *gated = attended + sequences * heads * width;
#pragma omp parallel num_threads(threads)
    {
        for (const LlamaLayer *layer = layers; layer < layers + llama->layers; layer++) {
            rms_norm(states, layer->norm, normed, sequences, size, llama->eps);
            product((Linear){layer->project, 0, all, size}, normed, 0, projected, sequences);
#pragma omp for collapse(2) schedule(static)
            for (long sequence = 0; sequence < sequences; sequence++)
                for (long i = 0; i < shared; i++) {
                    float *key = projected + sequence * all + (heads + i) * width, *value = key + shared * width;
                    long place = ((sequence * shared + i) * capacity + next[sequence]) * width;
                    rotate(key, cosines + sequence * width, sines + sequence * width, width);
                    memcpy(layer->keys + place, key, width * sizeof(float));
                    memcpy(layer->values + place, value, width * sizeof(float));
                }
#pragma omp for collapse(2) schedule(static)
            for (long sequence = 0; sequence < sequences; sequence++)
                for (long i = 0; i < heads; i++) {
                    float *query = projected + sequence * all + i * width;
                    long place = ((sequence * shared + i * shared / heads) * capacity + first[sequence]) * width;
                    rotate(query, cosines + sequence * width, sines + sequence * width, width);
                    attend(query, layer->keys + place, layer->values + place, attended + (sequence * heads + i) * width,
                           next[sequence] + 1 - first[sequence], width, llama->scale);
                }
            product((Linear){layer->output, 0, size, heads * width}, attended, states, states, sequences);
            rms_norm(states, layer->mlp_norm, normed, sequences, size, llama->eps);
            gated_product((Linear){layer->gate_up, 0, inner, size},
                          (Linear){layer->gate_up + inner * size, 0, inner, size}, normed, gated, sequences);
            product((Linear){layer->down, 0, size, inner}, gated, states, states, sequences);
        }
        rms_norm(states, llama->norm, normed, sequences, size, llama->eps);
    }
    memcpy(states, normed, sequences * size * sizeof(float));
}

/* x + down(silu(gate(y))·up(y)), y = RMSNorm(x): SwiGLULayer. scratch: size + inner elements per row. */
void calm_layer(const float *norm, const float *gate, const float *up, const float *down, const float *rows,
                float *result, float *scratch, long count, long size, long inner, float eps, int threads) {
    float *normed = scratch, *gated = normed + count * size;
#pragma omp parallel num_threads(threads)
    {
        rms_norm(rows, norm, normed, count, size, eps);
        gated_product((Linear){gate, 0, inner, size}, (Linear){up, 0, inner, size}, normed, gated, count);
        product((Linear){down, 0, size, inner}, gated, rows, result, count);
    }
}

typedef struct {
    const float *norm, *norm_bias, *fuse_state, *fuse_condition, *fuse_bias, *mix, *mix_bias, *gate_up, *gate_up_bias,
        *down, *down_bias;
} EnergyBlock;

/* EnergyBlock of heads/energy.py, with a condition for each row. scratch: 2·size elements per row. */
void calm_energy_block(const EnergyBlock *block, const float *rows, const float *conditions, float *result,
                       float *scratch, long count, long size, float eps, int threads) {
    float *one = scratch, *other = one + count * size;
#pragma omp parallel num_threads(threads)
    {
        layer_norm(rows, block->norm, block->norm_bias, one, count, size, eps);
        product((Linear){block->fuse_condition, block->fuse_bias, size, size}, conditions, 0, other, count);
        silu_product((Linear){block->fuse_state, 0, size, size}, one, other, other, count);
        silu_product((Linear){block->mix, block->mix_bias, size, size}, other, 0, one, count);
        gated_product((Linear){block->gate_up, block->gate_up_bias, size, size},
                      (Linear){block->gate_up + size * size, block->gate_up_bias + size, size, size}, one, other, count);
        product((Linear){block->down, block->down_bias, size, size}, other, rows, result, count);
    }
}

/* rows (count, inputs) @ matrix.T (outputs, inputs) + bias (optional) → (count, outputs) */
void calm_product(const float *matrix, const float *bias, const float *rows, float *result, long count, long outputs,
                  long inputs, int threads) {
#pragma omp parallel num_threads(outputs * inputs < SMALL ? 1 : threads)
    product((Linear){matrix, bias, outputs, inputs}, rows, 0, result, count);
}
