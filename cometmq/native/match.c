/* The machine of cometmq/filters/sql.py over a span of records. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>

#define STEPS_MAX 256
#define NUMBER_BYTES_MAX 64
#define LONG_BYTES_MAX 20
#define DIGITS_EXACT 15 /* a double holds so many, and powers of ten up to 22 */
#define POWER_EXACT 22

/* The numbers of cometmq.filters.sqlgrammar.Op. */
enum {
    PROPERTY, TEXT, LONG, DOUBLE, BOOLEAN, NOTHING, EQUAL, GREATER, GREATER_OR_EQUAL, LESS, LESS_OR_EQUAL, NOT, NEGATE,
    TRUTH, IN, CONTAINS, STARTSWITH, ENDSWITH, NOT_CONTAINS, NOT_STARTSWITH, NOT_ENDSWITH, SKIP_IF_FALSE, SKIP_IF_TRUE,
    AND, OR, OPS
};

typedef struct {
    int32_t op, argument;
    int64_t value;
} step;

typedef enum { IS_NULL, IS_BOOLEAN, IS_LONG, IS_DOUBLE, IS_TEXT } kind;

typedef struct {
    kind kind;
    int64_t number; /* of IS_BOOLEAN too */
    double real;
    span text;
} value;

typedef struct {
    step steps[STEPS_MAX];
    int32_t count;
    span texts;
} program;

/* How an evaluation goes on. */
typedef enum { GOOD, NO_NUMBER, UNSURE } outcome;

static const double powers[POWER_EXACT + 1] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                               1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* --- the program --- */

static int is_jump(int32_t op)
{
    return op == SKIP_IF_FALSE || op == SKIP_IF_TRUE;
}

static int has_text(int32_t op)
{
    return op == PROPERTY || op == TEXT || (op >= CONTAINS && op <= NOT_ENDSWITH);
}

static int is_list(const program *of, const step *one)
{
    size_t at = (size_t)one->argument;
    for (int64_t left = one->value; left > 0; left--) {
        uint32_t length;
        if (of->texts.length - at < sizeof length)
            return 0;
        memcpy(&length, of->texts.start + at, sizeof length);
        at += sizeof length;
        if (of->texts.length - at < length)
            return 0;
        at += length;
    }
    return 1;
}

/* Whether no step leads outside of the program or its texts, and the stack is as high wherever two ways meet. */
static int is_sound(const program *of)
{
    int32_t depth = 0, wanted[STEPS_MAX + 1]; /* depth that a skip arrives with */
    memset(wanted, 0xff, sizeof wanted);
    for (int32_t at = 0; at < of->count; at++) {
        const step *one = &of->steps[at];
        if (one->op < 0 || one->op >= OPS || one->argument < 0 || (size_t)one->argument > of->texts.length)
            return 0;
        if (has_text(one->op) && (one->value < 0 || (uint64_t)one->value > of->texts.length - (size_t)one->argument))
            return 0;
        if (one->op == IN && !is_list(of, one))
            return 0;
        if (wanted[at] >= 0 && wanted[at] != depth)
            return 0;
        int32_t takes = one->op <= NOTHING ? 0 : (one->op <= LESS_OR_EQUAL || one->op >= AND) ? 2 : 1;
        if (depth < takes)
            return 0;
        depth += 1 - takes;
        if (is_jump(one->op)) {
            if (one->value < 0 || one->value > of->count - at - 1)
                return 0;
            int32_t *there = &wanted[at + 1 + one->value];
            if (*there >= 0 && *there != depth)
                return 0;
            *there = depth;
        }
    }
    return depth == 1 && (wanted[of->count] < 0 || wanted[of->count] == 1);
}

/* --- numbers --- */

static int is_digit(uint8_t c)
{
    return c >= '0' && c <= '9';
}

/* The number that a text is. UNSURE where its double needs more than one exact operation. */
static outcome number_of(span text, value *into)
{
    const uint8_t *at = text.start, *end = text.start + text.length;
    if (text.length == 0 || text.length > NUMBER_BYTES_MAX)
        return NO_NUMBER;
    int is_negative = *at == '-';
    if (*at == '-' || *at == '+')
        at++;
    uint64_t digits = 0;
    int count = 0, exponent = 0, seen = 0, has_point = 0;
    for (; at < end && (is_digit(*at) || (*at == '.' && !has_point)); at++) {
        if (*at == '.') {
            has_point = 1;
            continue;
        }
        seen = 1;
        exponent -= has_point;
        if (digits || *at != '0')
            count++;
        if (count <= 18)
            digits = digits * 10 + (uint64_t)(*at - '0');
    }
    if (!seen)
        return NO_NUMBER;
    int is_long = !has_point && at == end;
    if (at < end && (*at == 'e' || *at == 'E')) {
        int sign = 1, power = 0, has_power = 0;
        if (++at < end && (*at == '+' || *at == '-'))
            sign = *at++ == '-' ? -1 : 1;
        for (; at < end && is_digit(*at); at++) {
            has_power = 1;
            if (power < 10000)
                power = power * 10 + (*at - '0');
        }
        if (!has_power)
            return NO_NUMBER;
        exponent += sign * power;
    }
    if (at != end)
        return NO_NUMBER;
    if (is_long && count <= 18 && text.length <= LONG_BYTES_MAX) {
        into->kind = IS_LONG;
        into->number = is_negative ? -(int64_t)digits : (int64_t)digits;
        return GOOD;
    }
    if (is_long || count > DIGITS_EXACT || exponent > POWER_EXACT || exponent < -POWER_EXACT)
        return UNSURE;
    double real = (double)digits;
    real = exponent < 0 ? real / powers[-exponent] : real * powers[exponent];
    into->kind = IS_DOUBLE;
    into->real = is_negative ? -real : real;
    return GOOD;
}

/* Both numbers of a comparison: as longs, or as doubles when one of them is. */
static outcome to_numbers(value *left, value *right)
{
    value *both[] = {left, right};
    for (int i = 0; i < 2; i++)
        if (both[i]->kind == IS_TEXT) {
            outcome found = number_of(both[i]->text, both[i]);
            if (found != GOOD)
                return found;
        }
    if (left->kind != right->kind)
        for (int i = 0; i < 2; i++)
            if (both[i]->kind == IS_LONG) {
                both[i]->kind = IS_DOUBLE;
                both[i]->real = (double)both[i]->number;
            }
    return GOOD;
}

/* --- values --- */

static void set_truth(value *into, int truth)
{
    into->kind = IS_BOOLEAN;
    into->number = truth;
}

static int is_truth(const value *one, int truth)
{
    return one->kind == IS_BOOLEAN && one->number == truth;
}

/* A text's or a boolean's; -1 for what has none. */
static int truth_of(const value *one)
{
    if (one->kind == IS_BOOLEAN)
        return (int)one->number;
    if (one->kind != IS_TEXT)
        return -1;
    const uint8_t *c = one->text.start;
    return one->text.length == 4 && (c[0] | 32) == 't' && (c[1] | 32) == 'r' && (c[2] | 32) == 'u'
           && (c[3] | 32) == 'e';
}

static outcome equal(value *left, value *right)
{
    if (left->kind == IS_NULL) {
        if (right->kind == IS_NULL)
            set_truth(left, 1);
    } else if (right->kind == IS_NULL) {
        set_truth(left, 0);
    } else if (left->kind == IS_TEXT && right->kind == IS_TEXT) {
        set_truth(left, is_same(left->text, right->text));
    } else if (left->kind == IS_BOOLEAN || right->kind == IS_BOOLEAN) {
        int first = truth_of(left), second = truth_of(right);
        set_truth(left, first >= 0 && first == second);
    } else {
        outcome found = to_numbers(left, right);
        if (found != GOOD)
            return found;
        set_truth(left, left->kind == IS_LONG ? left->number == right->number : left->real == right->real);
    }
    return GOOD;
}

static outcome related(int32_t op, value *left, value *right)
{
    if (left->kind == IS_NULL || right->kind == IS_NULL) {
        left->kind = IS_NULL;
        return GOOD;
    }
    if (left->kind == IS_BOOLEAN || right->kind == IS_BOOLEAN)
        return UNSURE; /* the compiler makes no such program */
    outcome found = to_numbers(left, right);
    if (found != GOOD)
        return found;
    int order = left->kind == IS_LONG ? (left->number > right->number) - (left->number < right->number)
                                      : (left->real > right->real) - (left->real < right->real);
    set_truth(left, op == GREATER            ? order > 0
                    : op == GREATER_OR_EQUAL ? order >= 0
                    : op == LESS             ? order < 0
                                             : order <= 0);
    return GOOD;
}

static int contains(span text, span part)
{
    const uint8_t *at = text.start;
    size_t left = text.length;
    while (left >= part.length) {
        const uint8_t *found = memchr(at, part.start[0], left - part.length + 1);
        if (found == NULL)
            return 0;
        if (memcmp(found, part.start, part.length) == 0)
            return 1;
        left -= (size_t)(found - at) + 1;
        at = found + 1;
    }
    return 0;
}

static void search(const step *one, span part, value *into)
{
    if (into->kind != IS_TEXT || part.length == 0) {
        set_truth(into, 0);
        return;
    }
    int32_t op = one->op >= NOT_CONTAINS ? one->op - NOT_CONTAINS + CONTAINS : one->op;
    span text = into->text;
    int found = op == CONTAINS ? contains(text, part) : text.length >= part.length;
    if (found && op == STARTSWITH)
        found = memcmp(text.start, part.start, part.length) == 0;
    if (found && op == ENDSWITH)
        found = memcmp(text.start + text.length - part.length, part.start, part.length) == 0;
    set_truth(into, op == one->op ? found : !found);
}

static void find_in(const program *of, const step *one, value *into)
{
    if (into->kind == IS_NULL)
        return;
    const uint8_t *at = of->texts.start + one->argument;
    int found = 0;
    for (int64_t left = one->value; left > 0 && !found && into->kind == IS_TEXT; left--) {
        uint32_t length;
        memcpy(&length, at, sizeof length);
        found = is_same(into->text, (span){at + sizeof length, length});
        at += sizeof length + length;
    }
    set_truth(into, found);
}

/* The last value that is not empty; as docs/format/properties.md reads pairs. */
static void find_property(span properties, span name, value *into)
{
    const uint8_t *at = properties.start, *end = at + properties.length;
    into->kind = IS_NULL;
    while (at < end) {
        const uint8_t *stop = memchr(at, 2, (size_t)(end - at));
        if (stop == NULL)
            stop = end;
        size_t length = (size_t)(stop - at);
        if (length > name.length + 1 && at[name.length] == 1 && memcmp(at, name.start, name.length) == 0) {
            into->kind = IS_TEXT;
            into->text = (span){at + name.length + 1, length - name.length - 1};
        }
        at = stop + 1;
    }
}

static void change(const program *of, const step *one, value *into)
{
    switch (one->op) {
    case NOT:
        if (into->kind == IS_BOOLEAN)
            into->number = !into->number;
        break;
    case NEGATE:
        if (into->kind == IS_LONG)
            into->number = -into->number; /* the smallest long cannot be written */
        else if (into->kind == IS_DOUBLE)
            into->real = -into->real;
        else
            into->kind = IS_NULL;
        break;
    case TRUTH:
        if (into->kind != IS_NULL)
            set_truth(into, 0);
        break;
    case IN:
        find_in(of, one, into);
        break;
    default:
        search(one, (span){of->texts.start + one->argument, (size_t)one->value}, into);
    }
}

static void join(int truth, value *left, const value *right)
{
    if (is_truth(left, truth) || is_truth(right, truth))
        set_truth(left, truth);
    else if (left->kind == IS_NULL || right->kind == IS_NULL)
        left->kind = IS_NULL;
    else
        set_truth(left, !truth);
}

static void push(const program *of, const step *one, span properties, value *into)
{
    span text = {of->texts.start + one->argument, (size_t)one->value};
    switch (one->op) {
    case PROPERTY:
        find_property(properties, text, into);
        break;
    case TEXT:
        into->kind = IS_TEXT;
        into->text = text;
        break;
    case LONG:
        into->kind = IS_LONG;
        into->number = one->value;
        break;
    case DOUBLE:
        into->kind = IS_DOUBLE;
        memcpy(&into->real, &one->value, sizeof into->real);
        break;
    case BOOLEAN:
        set_truth(into, one->value != 0);
        break;
    default:
        into->kind = IS_NULL;
    }
}

/* Whether a message with these properties matches, in `is_match`; 0 when only plain Python can tell. */
static int evaluate(const program *of, span properties, value *stack, uint8_t *is_match)
{
    value *top = stack - 1;
    for (int32_t at = 0; at < of->count; at++) {
        const step *one = &of->steps[at];
        outcome found = GOOD;
        if (one->op <= NOTHING) {
            push(of, one, properties, ++top);
        } else if (one->op == EQUAL) {
            top--;
            found = equal(top, top + 1);
        } else if (one->op <= LESS_OR_EQUAL) {
            top--;
            found = related(one->op, top, top + 1);
        } else if (is_jump(one->op)) {
            if (is_truth(top, one->op == SKIP_IF_TRUE))
                at += (int32_t)one->value;
        } else if (one->op >= AND) {
            top--;
            join(one->op == OR, top, top + 1);
        } else {
            change(of, one, top);
        }
        if (found == UNSURE)
            return 0;
        if (found == NO_NUMBER) {
            *is_match = 0;
            return 1;
        }
    }
    *is_match = (uint8_t)is_truth(stack, 1);
    return 1;
}

/* The end of the last record with a verdict; the verdicts go to `verdicts`, a byte each. */
static size_t walk(const program *of, span records, size_t at, value *stack, uint8_t *verdicts, Py_ssize_t *count)
{
    record found;
    while (at < records.length && record_at(records.start + at, records.length - at, &found)
           && evaluate(of, found.properties, stack, &verdicts[*count])) {
        at += found.size;
        ++*count;
    }
    return at;
}

static PyObject *matched(const program *of, const Py_buffer *records, Py_ssize_t at)
{
    value *stack = malloc((STEPS_MAX + 1) * sizeof(value));
    uint8_t *verdicts = malloc((size_t)(records->len - at) / RECORD_BYTES_MIN + 1);
    PyObject *result = NULL;
    if (stack == NULL || verdicts == NULL) {
        PyErr_NoMemory();
    } else {
        Py_ssize_t count = 0;
        BEGIN_WORK(records->len - at)
        size_t end = walk(of, span_of(records), (size_t)at, stack, verdicts, &count);
        END_WORK
        result = Py_BuildValue("ny#", (Py_ssize_t)end, (const char *)verdicts, count);
    }
    free(stack);
    free(verdicts);
    return result;
}

PyObject *accelerator_match(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer records, code, texts;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(arguments, "y*ny*y*:match", &records, &at, &code, &texts))
        return NULL;
    PyObject *result = NULL;
    program *of = malloc(sizeof(program));
    if (of == NULL) {
        PyErr_NoMemory();
    } else if (code.len % (Py_ssize_t)sizeof(step) || code.len > (Py_ssize_t)sizeof of->steps || at < 0
               || at > records.len) {
        PyErr_SetString(PyExc_ValueError, "match: a program that is not whole, or a place outside the records");
    } else {
        memcpy(of->steps, code.buf, (size_t)code.len);
        of->count = (int32_t)(code.len / (Py_ssize_t)sizeof(step));
        of->texts = span_of(&texts);
        if (is_sound(of))
            result = matched(of, &records, at);
        else
            PyErr_SetString(PyExc_ValueError, "match: a program that leads astray");
    }
    free(of);
    PyBuffer_Release(&records);
    PyBuffer_Release(&code);
    PyBuffer_Release(&texts);
    return result;
}
