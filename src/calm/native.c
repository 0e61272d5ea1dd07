/* Steps of a single text on CPUs: products of a matrix with few rows, and one position through the layers of a Llama.
 *
 * Such a step reads every weight once and computes little. In torch it is some hundred operations, each of which costs
 * more than it computes, since the weights have swept everything else out of the caches; here it is one, and reading is
 * what takes the time. What is computed is sampling/llama_step.py, which does the same where there is no compiler.
 * native.py compiles this file. OpenMP's threads are those that torch has already.
 */
#include <math.h>
#include <string.h>

#define SMALL 16384 /* numbers of a matrix that one thread has read before others are awake */
#define ROWS 64     /* of a matrix that a thread takes at once: whoever is slowed down by other programs takes fewer */

typedef struct {
    const float *norm, *project, *output, *mlp_norm, *gate_up, *down;
    float *keys, *values; /* (shared, room, width) */
} Layer;

typedef struct {
    long layers, size, inner, heads, shared, width; /* H, the MLP's width, heads of queries, of keys, numbers of a head */
    float eps, scale;
    const float *norm;
} Llama;

static float dot(const float *a, const float *b, long count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* What follows is called by all threads of a team together, each of which does its part. */

static void rms_norm(const float *state, const float *weight, float *normed, long size, float eps) {
    float scale = 1 / sqrtf(dot(state, state, size) / size + eps);
#pragma omp for schedule(static)
    for (long i = 0; i < size; i++) normed[i] = state[i] * scale * weight[i];
}

static void add_product(const float *matrix, const float *row, float *sum, long outputs, long inputs) {
#pragma omp for schedule(dynamic, ROWS)
    for (long i = 0; i < outputs; i++) sum[i] += dot(matrix + i * inputs, row, inputs);
}

static void turn(float *head, const float *cosines, const float *sines, long width) {
    long half = width / 2;
    for (long i = 0; i < half; i++) {
        float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

/* The mean of values by softmax of query·key, in one pass: what was added is scaled down when a larger product comes. */
static void attend(const float *query, const float *keys, const float *values, float *found, long length, long width,
                   float scale) {
    float largest = -INFINITY, sum = 0;
    memset(found, 0, width * sizeof(float));
    for (long at = 0; at < length; at++) {
        float product = dot(query, keys + at * width, width) * scale;
        if (product > largest) {
            float less = expf(largest - product);
            for (long i = 0; i < width; i++) found[i] *= less;
            sum *= less;
            largest = product;
        }
        float weight = expf(product - largest);
        for (long i = 0; i < width; i++) found[i] += weight * values[at * width + i];
        sum += weight;
    }
    for (long i = 0; i < width; i++) found[i] /= sum;
}

/* state (H) → the norm of what all layers make of it, in place; `length` counts this position, which keys and values
 * have room for. scratch: H + (heads + 2·shared + heads)·width + inner numbers. */
void calm_llama_step(const Llama *llama, const Layer *layers, float *state, const float *cosines, const float *sines,
                     long length, long room, float *scratch, int threads) {
    long size = llama->size, width = llama->width, heads = llama->heads, shared = llama->shared, inner = llama->inner;
    long all = (heads + 2 * shared) * width;
    float *normed = scratch, *projected = normed + size, *attended = projected + all, *gated = attended + heads * width;
#pragma omp parallel num_threads(threads)
    {
        for (const Layer *layer = layers; layer < layers + llama->layers; layer++) {
            rms_norm(state, layer->norm, normed, size, llama->eps);
#pragma omp for schedule(dynamic, ROWS)
            for (long i = 0; i < all; i++) projected[i] = dot(layer->project + i * size, normed, size);
#pragma omp for schedule(static)
            for (long i = 0; i < shared; i++) {
                float *key = projected + (heads + i) * width, *value = key + shared * width;
                long place = (i * room + length - 1) * width;
                turn(key, cosines, sines, width);
                memcpy(layer->keys + place, key, width * sizeof(float));
                memcpy(layer->values + place, value, width * sizeof(float));
            }
#pragma omp for schedule(static)
            for (long i = 0; i < heads; i++) {
                float *query = projected + i * width;
                long first = i * shared / heads * room * width;
                turn(query, cosines, sines, width);
                attend(query, layer->keys + first, layer->values + first, attended + i * width, length, width,
                       llama->scale);
            }
            add_product(layer->output, attended, state, size, heads * width);
            rms_norm(state, layer->mlp_norm, normed, size, llama->eps);
#pragma omp for schedule(dynamic, ROWS)
            for (long i = 0; i < inner; i++) {
                float gate = dot(layer->gate_up + i * size, normed, size);
                gated[i] = gate / (1 + expf(-gate)) * dot(layer->gate_up + (inner + i) * size, normed, size);
            }
            add_product(layer->down, gated, state, size, inner);
        }
        rms_norm(state, llama->norm, normed, size, llama->eps);
    }
    memcpy(state, normed, size * sizeof(float));
}

/* rows (count, inputs) @ matrix.T (outputs, inputs) + bias, where there is one → (count, outputs) */
void calm_product(const float *matrix, const float *rows, const float *bias, float *found, long outputs, long inputs,
                  long count, int threads) {
#pragma omp parallel for schedule(dynamic, ROWS) num_threads(outputs * inputs < SMALL ? 1 : threads)
    for (long i = 0; i < outputs; i++)
        for (long row = 0; row < count; row++)
            found[row * outputs + i] = dot(matrix + i * inputs, rows + row * inputs, inputs) + (bias ? bias[i] : 0);
}
