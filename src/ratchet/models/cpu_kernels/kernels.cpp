// Operators of a decoder block in float32, forward and backward, for CPUs with AVX2 or AVX-512. Compiled by library.py,
// called by attention.py and operators.py. No result depends on the number of threads.
//
// Causal attention of rows: a unit of work is one row and one head of keys, with all heads of queries that share it.
// It copies its keys and values into contiguous memory, and goes through the queries in blocks; the scores of a block,
// BLOCK x keys, stay in a core's cache. Only scores up to the diagonal are computed. The backward pass computes them
// again, and the attention weights from the log-sum-exp that the forward pass returned (Dao et al. 2022,
// arXiv 2205.14135).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;  // a tile of a product is 12 x 32: 24 of 32 registers
#else
constexpr int LANES = 8, ROWS = 6;  // 6 x 16: 12 of 16 registers
#endif
constexpr int COLUMNS = 2 * LANES;
constexpr long BLOCK = 48;  // queries of a block; a multiple of ROWS

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float UnalignedVector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef float Float4 __attribute__((vector_size(4 * sizeof(float))));
typedef int32_t Int4 __attribute__((vector_size(4 * sizeof(int32_t))));

static long round_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

// Run work(unit, thread) for each unit of [0, count). Each thread takes the next unit, so fewer threads do all units too.
template <typename Work>
static void share(long count, long threads, const Work& work) {
    std::atomic<long> next{0};
    const auto take_units = [&](long thread) {
        for (long unit = next++; unit < count; unit = next++) work(unit, thread);
    };
    std::vector<std::thread> others;
    try {
        for (long thread = 1; thread < threads; thread++) others.emplace_back(take_units, thread);
    } catch (const std::system_error&) {
        // the system allows no more threads
    }
    take_units(0);
    for (auto& other : others) other.join();
}

// Run work(first, end) for one part of the range [0, count) in each thread. Parts begin at multiples of `unit`.
template <typename Work>
static void divide(long count, long unit, long threads, const Work& work) {
    const long part = round_up((count + threads - 1) / threads, unit);
    share(threads, threads, [&](long number, long) {
        if (number * part < count) work(number * part, std::min(count, (number + 1) * part));
    });
}

// Heads [sequences, heads, positions, width] of float32, contiguous in width. Strides count elements.
struct Heads {
    float* data;
    int64_t sequence, head, position;

    float* at(long s, long h, long p) const { return data + s * sequence + h * head + p * position; }
};

// A row: positions start to end of a sequence. If is_row is 0, each position is a row of one token.
struct Span {
    int64_t sequence, start, end, is_row;
};

struct Attention {
    Heads query, key, value, output, gradient;  // gradient: that of the output
    Heads query_gradient, key_gradient, value_gradient;
    float* log_sums;  // log-sum-exp of the scaled scores of each query, [sequences, heads, positions]
    const Span* spans;
    float* workspace;  // [threads, workspace_floats]
    int64_t span_count, heads, key_heads, positions, width, workspace_floats, threads;
    float scale;
};

static Vector load(const float* from) { return *reinterpret_cast<const UnalignedVector*>(from); }

static void store(float* to, Vector values) { *reinterpret_cast<UnalignedVector*>(to) = values; }

static Vector fill(float value) { return Vector{} + value; }

// Combine all lanes: first the halves of the vector, then the halves of the result, down to one number.
template <typename Combine>
static float reduce(Vector values, const Combine& combine) {
    Float4 parts[LANES / 4];
    std::memcpy(parts, &values, sizeof(values));
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = combine(parts[i], parts[i + half]);
    const Float4 swapped = combine(parts[0], __builtin_shuffle(parts[0], (Int4){2, 3, 0, 1}));
    return combine(swapped, __builtin_shuffle(swapped, (Int4){1, 0, 3, 2}))[0];
}

// A product that is rounded before it is added. Otherwise, a compiler may choose which of two products it fuses with
// their sum, and another compiler would compute other bits.
static Vector rounded(Vector product) {
    asm("" : "+x"(product));
    return product;
}

static float sum(Vector values) {
    return reduce(values, [](auto a, auto b) { return a + b; });
}

static float largest(Vector values) {
    return reduce(values, [](auto a, auto b) { return b > a ? b : a; });
}

// exp(x) with a relative error below 2e-7, for x limited to [-87, 88]; NaN stays NaN. x is n log(2) + r, and exp(r) is
// the sum of r^k / k! up to k = 7.
static Vector exponential(Vector x) {
    x = x < -87.0f ? fill(-87.0f) : x;
    x = x > 88.0f ? fill(88.0f) : x;
    const Vector shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vector n = (x * 1.44269504f + shift) - shift;
    const Vector r = (x - n * 0.693145752f) - n * 1.42860682e-6f;  // log(2) in two parts, the first of 16 bits
    Vector series = fill(1.0f / 5040);
    for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) series = series * r + term;
    const IntVector exponent = (__builtin_convertvector(n, IntVector) + 127) << 23;
    return series * (Vector)exponent;  // the same bits, read as float32
}

// out[M, N * LANES] = a b, or out += a b if `adds`. Element (i, k) of `a` is at a[i * a_row + k * a_column].
template <int M, int N>
static void multiply_tile(long inner, const float* a, long a_row, long a_column, const float* b, long b_row,
                          float* out, long out_row, bool adds) {
    Vector sums[M][N];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) sums[i][j] = adds ? load(out + i * out_row + j * LANES) : Vector{};
    for (long k = 0; k < inner; k++) {
        Vector right[N];
        for (int j = 0; j < N; j++) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const Vector left = fill(a[i * a_row + k * a_column]);
            for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) store(out + i * out_row + j * LANES, sums[i][j]);
}

// The same for any number of rows up to M, and a number of columns that is a multiple of LANES.
template <int M = ROWS>
static void multiply(int rows, long columns, long inner, const float* a, long a_row, long a_column, const float* b,
                     long b_row, float* out, long out_row, bool adds) {
    if constexpr (M > 1)
        if (rows < M) return multiply<M - 1>(rows, columns, inner, a, a_row, a_column, b, b_row, out, out_row, adds);
    long j = 0;
    for (; j + COLUMNS <= columns; j += COLUMNS)
        multiply_tile<M, 2>(inner, a, a_row, a_column, b + j, b_row, out + j, out_row, adds);
    if (j < columns) multiply_tile<M, 1>(inner, a, a_row, a_column, b + j, b_row, out + j, out_row, adds);
}

// out[j * out_row + i] = in[i * in_row + j]. Rows from `rows` up to a multiple of LANES become columns of zeros.
static void transpose(const float* in, long in_row, long rows, long columns, float* out, long out_row) {
    IntVector low, high;  // they interleave the first, or second, halves of two vectors
    for (int i = 0; i < LANES; i++) {
        low[i] = i / 2 + i % 2 * LANES;
        high[i] = low[i] + LANES / 2;
    }
    for (long i = 0; i < rows; i += LANES)
        for (long j = 0; j < columns; j += LANES) {
            Vector now[LANES], next[LANES];
            for (int k = 0; k < LANES; k++) now[k] = i + k < rows ? load(in + (i + k) * in_row + j) : Vector{};
#pragma GCC unroll 4
            for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 16
                for (int k = 0; k < LANES / 2; k++) {
                    next[2 * k] = __builtin_shuffle(now[k], now[k + LANES / 2], low);
                    next[2 * k + 1] = __builtin_shuffle(now[k], now[k + LANES / 2], high);
                }
                for (int k = 0; k < LANES; k++) now[k] = next[k];
            }
            for (int k = 0; k < LANES; k++) store(out + (j + k) * out_row + i, now[k]);
        }
}

static void copy_rows(const float* in, long in_row, long rows, long columns, float* out, long out_row) {
    for (long i = 0; i < rows; i++) std::memcpy(out + i * out_row, in + i * in_row, columns * sizeof(float));
}

// Replace the scores of a query by exp(scale (score - largest score)), with zeros after the query's own position, up to
// a multiple of LANES. Returns the sum, and sets `log_sum` to log(sum(exp(scale * score))).
static float exponentiate(float* scores, long visible, float scale, float* log_sum) {
    const long end = round_up(visible, LANES);
    for (long j = visible; j < end; j++) scores[j] = -INFINITY;
    Vector tops = load(scores);
    for (long j = LANES; j < end; j += LANES) {
        const Vector next = load(scores + j);
        tops = next > tops ? next : tops;
    }
    const float top = largest(tops);
    Vector sums{};
    for (long j = 0; j < end; j += LANES) {
        const Vector score = load(scores + j);
        const Vector weight = score == -INFINITY ? Vector{} : exponential((score - top) * scale);
        sums += weight;
        store(scores + j, weight);
    }
    const float total = sum(sums);
    *log_sum = top * scale + std::log(total);
    return total;
}

static void clear_after(float* values, long from, long to) {
    if (from < to) std::memset(values + from, 0, (to - from) * sizeof(float));
}

static void attend(const Attention& task, const Span& span, long key_head, float* workspace) {
    const long count = span.end - span.start, width = task.width, group = task.heads / task.key_heads;
    const long score_row = round_up(count, COLUMNS);
    float *keys = workspace, *values = keys + width * score_row;  // [width, score_row], [count, width]
    float *queries = values + count * width, *outputs = queries + BLOCK * width, *scores = outputs + BLOCK * width;
    transpose(task.key.at(span.sequence, key_head, span.start), task.key.position, count, width, keys, score_row);
    copy_rows(task.value.at(span.sequence, key_head, span.start), task.value.position, count, width, values, width);
    for (long head = key_head * group; head < (key_head + 1) * group; head++)
        for (long first = 0; first < count; first += BLOCK) {
            const long rows = std::min(BLOCK, count - first), position = span.start + first;
            copy_rows(task.query.at(span.sequence, head, position), task.query.position, rows, width, queries, width);
            float* log_sums = task.log_sums + (span.sequence * task.heads + head) * task.positions + position;
            for (long i = 0; i < rows; i += ROWS) {
                const int some = std::min<long>(ROWS, rows - i);
                const long visible = first + i + some;
                float *query = queries + i * width, *score = scores + i * score_row, *output = outputs + i * width;
                multiply(some, round_up(visible, LANES), width, query, width, 1, keys, score_row, score, score_row,
                         false);
                float totals[ROWS];
                for (int k = 0; k < some; k++) {
                    float* weights = score + k * score_row;
                    totals[k] = exponentiate(weights, first + i + k + 1, task.scale, log_sums + i + k);
                    clear_after(weights, round_up(first + i + k + 1, LANES), visible);
                }
                multiply(some, width, visible, score, score_row, 1, values, width, output, width, false);
                for (int k = 0; k < some; k++) {
                    float* to = task.output.at(span.sequence, head, position + i + k);
                    for (long j = 0; j < width; j += LANES) store(to + j, load(output + k * width + j) / totals[k]);
                }
            }
        }
}

// Replace the scores of a query by its attention weights, and the gradients of the weights by those of the unscaled
// scores. `log_sum` is the log-sum-exp of the scaled scores; `mean` is the sum of weight * gradient over the keys, computed
// as the product of the output and its gradient. Both arrays become zero after the query's own position, up to `end`.
static void differentiate(float* scores, float* gradients, long visible, long end, float scale, float log_sum,
                          float mean) {
    for (long j = 0; j < visible; j += LANES) {
        const Vector weight = exponential(load(scores + j) * scale - log_sum);
        store(scores + j, weight);
        store(gradients + j, weight * (load(gradients + j) - mean) * scale);
    }
    clear_after(scores, visible, end);
    clear_after(gradients, visible, end);
}

static void attend_backward(const Attention& task, const Span& span, long key_head, float* workspace) {
    const long count = span.end - span.start, width = task.width, group = task.heads / task.key_heads;
    const long score_row = round_up(count, COLUMNS);
    float *keys_t = workspace, *values_t = keys_t + width * score_row, *keys = values_t + width * score_row;
    float *key_gradients = keys + count * width, *value_gradients = key_gradients + count * width;
    float *queries = value_gradients + count * width, *gradients = queries + BLOCK * width;
    float *query_gradients = gradients + BLOCK * width, *weights = query_gradients + BLOCK * width;
    float* score_gradients = weights + BLOCK * score_row;
    const float* key = task.key.at(span.sequence, key_head, span.start);
    transpose(key, task.key.position, count, width, keys_t, score_row);
    transpose(task.value.at(span.sequence, key_head, span.start), task.value.position, count, width, values_t,
              score_row);
    copy_rows(key, task.key.position, count, width, keys, width);
    clear_after(key_gradients, 0, 2 * count * width);
    for (long head = key_head * group; head < (key_head + 1) * group; head++)
        for (long first = 0; first < count; first += BLOCK) {
            const long rows = std::min(BLOCK, count - first), position = span.start + first, end = first + rows;
            copy_rows(task.query.at(span.sequence, head, position), task.query.position, rows, width, queries, width);
            copy_rows(task.gradient.at(span.sequence, head, position), task.gradient.position, rows, width, gradients,
                      width);
            const float* log_sums = task.log_sums + (span.sequence * task.heads + head) * task.positions + position;
            for (long i = 0; i < rows; i += ROWS) {
                const int some = std::min<long>(ROWS, rows - i);
                const long visible = first + i + some, columns = round_up(visible, LANES);
                float *weight = weights + i * score_row, *score_gradient = score_gradients + i * score_row;
                const float *query = queries + i * width, *gradient = gradients + i * width;
                multiply(some, columns, width, query, width, 1, keys_t, score_row, weight, score_row, false);
                multiply(some, columns, width, gradient, width, 1, values_t, score_row, score_gradient, score_row,
                         false);
                for (int k = 0; k < some; k++) {
                    const float* output = task.output.at(span.sequence, head, position + i + k);
                    Vector products{};
                    for (long j = 0; j < width; j += LANES) products += load(output + j) * load(gradient + k * width + j);
                    differentiate(weight + k * score_row, score_gradient + k * score_row, first + i + k + 1, end,
                                  task.scale, log_sums[i + k], sum(products));
                }
                multiply(some, width, visible, score_gradient, score_row, 1, keys, width,
                         query_gradients + i * width, width, false);
            }
            for (long j = 0; j < end; j += ROWS) {
                const int some = std::min<long>(ROWS, end - j);
                const long from = std::max(0L, j - first);  // earlier queries do not see these keys
                multiply(some, width, rows - from, weights + from * score_row + j, 1, score_row,
                         gradients + from * width, width, value_gradients + j * width, width, true);
                multiply(some, width, rows - from, score_gradients + from * score_row + j, 1, score_row,
                         queries + from * width, width, key_gradients + j * width, width, true);
            }
            copy_rows(query_gradients, width, rows, width, task.query_gradient.at(span.sequence, head, position),
                      task.query_gradient.position);
        }
    copy_rows(key_gradients, width, count, width, task.key_gradient.at(span.sequence, key_head, span.start),
              task.key_gradient.position);
    copy_rows(value_gradients, width, count, width, task.value_gradient.at(span.sequence, key_head, span.start),
              task.value_gradient.position);
}

// A token that sees only itself: its output is its value.
static void attend_to_itself(const Attention& task, const Span& span, long key_head) {
    const long group = task.heads / task.key_heads;
    for (long head = key_head * group; head < (key_head + 1) * group; head++)
        copy_rows(task.value.at(span.sequence, key_head, span.start), task.value.position, span.end - span.start,
                  task.width, task.output.at(span.sequence, head, span.start), task.output.position);
}

static void attend_to_itself_backward(const Attention& task, const Span& span, long key_head) {
    const long group = task.heads / task.key_heads, first = key_head * group;
    for (long p = span.start; p < span.end; p++) {
        float* total = task.value_gradient.at(span.sequence, key_head, p);
        clear_after(total, 0, task.width);
        clear_after(task.key_gradient.at(span.sequence, key_head, p), 0, task.width);
        for (long head = first; head < first + group; head++) {
            clear_after(task.query_gradient.at(span.sequence, head, p), 0, task.width);
            const float* gradient = task.gradient.at(span.sequence, head, p);
            for (long j = 0; j < task.width; j++) total[j] += gradient[j];
        }
    }
}

// Floats that a thread needs for rows of up to `longest` positions.
extern "C" int64_t ratchet_attention_workspace(int64_t longest, int64_t width, int is_backward) {
    const long scores = round_up(longest, COLUMNS);
    const long copies = is_backward ? 2 * width * scores + 3 * longest * width : width * scores + longest * width;
    return is_backward ? copies + BLOCK * (3 * width + 2 * scores) : copies + BLOCK * (2 * width + scores);
}

extern "C" void ratchet_attention(const Attention* task, int is_backward) {
    share(task->span_count * task->key_heads, task->threads, [=](long unit, long thread) {
        const Span& span = task->spans[unit / task->key_heads];
        const long key_head = unit % task->key_heads;
        float* workspace = task->workspace + thread * task->workspace_floats;
        if (span.is_row)
            (is_backward ? attend_backward : attend)(*task, span, key_head, workspace);
        else
            (is_backward ? attend_to_itself_backward : attend_to_itself)(*task, span, key_head);
    });
}

// Other operators. Counts and widths are multiples of LANES; the width of rotated heads is a multiple of 2 * LANES.

static Vector sigmoid(Vector x) { return x < -88.0f ? Vector{} : 1.0f / (1.0f + exponential(-x)); }

// silu(gate) * up, and its gradients.
extern "C" void ratchet_gated_unit(const float* gate, const float* up, float* output, int64_t count, int64_t threads) {
    divide(count, LANES, threads, [=](long first, long end) {
        for (long i = first; i < end; i += LANES) {
            const Vector x = load(gate + i);
            store(output + i, x * sigmoid(x) * load(up + i));
        }
    });
}

extern "C" void ratchet_gated_unit_backward(const float* gradient, const float* gate, const float* up,
                                            float* gate_gradient, float* up_gradient, int64_t count, int64_t threads) {
    divide(count, LANES, threads, [=](long first, long end) {
        for (long i = first; i < end; i += LANES) {
            const Vector x = load(gate + i), share = sigmoid(x), outer = load(gradient + i);
            store(up_gradient + i, outer * x * share);
            store(gate_gradient + i, outer * load(up + i) * share * (1.0f + x * (1.0f - share)));
        }
    });
}

// weight * x * factor, with factor = 1 / sqrt(mean(x * x) + epsilon) of each row [width], and its gradient.
extern "C" void ratchet_norm(const float* x, const float* weight, float epsilon, float* output, float* factors,
                             int64_t rows, int64_t width, int64_t threads) {
    divide(rows, 1, threads, [=](long first, long end) {
        for (long row = first; row < end; row++) {
            const float* values = x + row * width;
            Vector squares{};
            for (long j = 0; j < width; j += LANES) squares += load(values + j) * load(values + j);
            const float factor = 1.0f / std::sqrt(sum(squares) / width + epsilon);
            factors[row] = factor;
            for (long j = 0; j < width; j += LANES)
                store(output + row * width + j, load(weight + j) * (load(values + j) * factor));
        }
    });
}

extern "C" void ratchet_norm_backward(const float* gradient, const float* x, const float* weight, const float* factors,
                                      float* x_gradient, int64_t rows, int64_t width, int64_t threads) {
    divide(rows, 1, threads, [=](long first, long end) {
        for (long row = first; row < end; row++) {
            const float *values = x + row * width, *outer = gradient + row * width, factor = factors[row];
            Vector products{};
            for (long j = 0; j < width; j += LANES) products += load(outer + j) * load(weight + j) * load(values + j);
            const float share = -sum(products) * factor * factor * factor / width;
            for (long j = 0; j < width; j += LANES)
                store(x_gradient + row * width + j,
                      rounded(load(outer + j) * load(weight + j) * factor) + load(values + j) * share);
        }
    });
}

// Rotary position embedding of heads (Su et al. 2021, arXiv 2104.09864): element j of the first half of a head and the
// same element of the second half are rotated by an angle of the position. `cosines` and `sines` are
// [sequences or 1, positions, width]. The gradient is the rotation back.
extern "C" void ratchet_rotate(const Heads* x, const Heads* output, const float* cosines, const float* sines,
                               int64_t angles_sequence, int64_t sequences, int64_t heads, int64_t positions,
                               int64_t width, int64_t is_backward, int64_t threads) {
    const long half = width / 2;
    divide(sequences * positions, 1, threads, [=](long first, long end) {
        for (long i = first; i < end; i++) {
            const long sequence = i / positions, position = i % positions;
            const float *cosine = cosines + sequence * angles_sequence + position * width;
            const float *sine = sines + sequence * angles_sequence + position * width;
            for (long head = 0; head < heads; head++) {
                const float* from = x->at(sequence, head, position);
                float* to = output->at(sequence, head, position);
                for (long j = 0; j < half; j += LANES) {
                    const Vector low = load(from + j), high = load(from + half + j);
                    const Vector low_cosine = rounded(low * load(cosine + j));
                    const Vector high_cosine = rounded(high * load(cosine + half + j));
                    if (is_backward) {
                        store(to + j, low_cosine + high * load(sine + half + j));
                        store(to + half + j, high_cosine - low * load(sine + j));
                    } else {
                        store(to + j, low_cosine - high * load(sine + j));
                        store(to + half + j, high_cosine + low * load(sine + half + j));
                    }
                }
            }
        }
    });
}

// output[rows, columns] += left[rows, inner] right[inner, columns], for a small `inner`. All are contiguous.
extern "C" void ratchet_add_product(const float* left, const float* right, float* output, int64_t rows, int64_t inner,
                                    int64_t columns, int64_t threads) {
    divide(rows, ROWS, threads, [=](long first, long end) {
        for (long i = first; i < end; i += ROWS)
            multiply(std::min<long>(ROWS, end - i), columns, inner, left + i * inner, inner, 1, right, columns,
                     output + i * columns, columns, true);
    });
}
