/* A message as an application sends it: cometmq/model.py, which also adds what is not hot.
 *
 * The garbage collector does not track it: it refers to bytes, texts and numbers, never back to itself. */

#include "message.h"

#include "text.h"

#include <stddef.h>
#include <structmember.h>

#define DELAY_LEVEL_MAX 64

static PyTypeObject *message_type;
static PyObject *no_text, *no_keys, *number_zero; /* there is one of each */

int is_message(PyObject *object)
{
    return Py_TYPE(object) == message_type;
}

/* Whether `field` is true, where it usually is `usual`, which is false; -1 with an exception set. */
static int is_set(PyObject *field, PyObject *usual)
{
    return field == usual ? 0 : PyObject_IsTrue(field);
}

int is_number(PyObject *object, long *number)
{
    int overflow;
    if (!PyLong_CheckExact(object))
        return 0;
    *number = PyLong_AsLongAndOverflow(object, &overflow);
    return !overflow && *number >= INT32_MIN && *number <= INT32_MAX;
}

/* Whether it is a tuple of texts that are keys: not empty, and without a blank. */
static int are_keys(PyObject *keys)
{
    if (!PyTuple_CheckExact(keys))
        return 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(keys); at++) {
        PyObject *key = PyTuple_GetItem(keys, at);
        Py_ssize_t length;
        const char *start = PyUnicode_CheckExact(key) ? PyUnicode_AsUTF8AndSize(key, &length) : NULL;
        if (start == NULL)
            PyErr_Clear(); /* Python says what is wrong */
        if (start == NULL || length == 0 || has_blank((span){(const uint8_t *)start, (size_t)length}))
            return 0;
    }
    return 1;
}

static int are_pairs(PyObject *properties)
{
    Py_ssize_t at = 0;
    PyObject *name, *value;
    if (!PyDict_CheckExact(properties))
        return 0;
    while (PyDict_Next(properties, &at, &name, &value))
        if (!PyUnicode_CheckExact(name) || !PyUnicode_CheckExact(value))
            return 0;
    return 1;
}

/* Whether Python would find nothing wrong with any field. */
static int is_certain(PyObject *const *fields)
{
    long flag, delay_level, at_ms, after_ms;
    return are_keys(fields[KEYS]) && are_pairs(fields[PROPERTIES]) && is_number(fields[FLAG], &flag)
        && is_number(fields[DELAY_LEVEL], &delay_level) && delay_level >= 0 && delay_level <= DELAY_LEVEL_MAX
        && is_number(fields[DELIVER_AT_MS], &at_ms) && at_ms == 0 && is_number(fields[DELAY_MS], &after_ms) && after_ms == 0
        && PyUnicode_CheckExact(fields[SHARDING_KEY]) && PyBool_Check(fields[WAIT_STORE]) && fields[QUEUE] == Py_None
        && PyBytes_CheckExact(fields[BODY]) && PyUnicode_CheckExact(fields[TOPIC]) && PyUnicode_CheckExact(fields[TAG]);
}

/* Whether Python has to look at a message that was just made; -1 with an exception set. As there, one with topic, body and
 * tag only is not looked at further. The properties count as given: without any the message has an empty dict. */
static int has_doubts(PyObject *const *fields, PyObject *properties)
{
    long level;
    int found = is_set(fields[KEYS], no_keys);
    if (found == 0 && properties != NULL)
        found = is_set(properties, Py_None);
    if (found == 0)
        found = is_set(fields[FLAG], number_zero);
    if (found == 0 && (found = is_set(fields[DELAY_LEVEL], number_zero)) == 1)
        found = !is_number(fields[DELAY_LEVEL], &level) || level <= 0 || level > DELAY_LEVEL_MAX;
    if (found == 0)
        found = is_set(fields[DELIVER_AT_MS], number_zero);
    if (found == 0)
        found = is_set(fields[DELAY_MS], number_zero);
    if (found == 0)
        found = is_set(fields[SHARDING_KEY], no_text);
    if (found == 0)
        found = fields[WAIT_STORE] != Py_True || fields[QUEUE] != Py_None || !PyBytes_CheckExact(fields[BODY])
            || !PyUnicode_CheckExact(fields[TOPIC]) || !PyUnicode_CheckExact(fields[TAG]);
    return found == 1 ? !is_certain(fields) : found;
}

static int set_fields(message *self, PyObject *const *given)
{
    PyObject *const usual[FIELDS] = {NULL,        NULL,    no_text,     no_keys, NULL,
                                     number_zero, Py_None, number_zero, no_text, Py_True,
                                     number_zero, number_zero};
    for (int field = 0; field < FIELDS; field++) {
        PyObject *value = given[field] == NULL ? usual[field] : given[field];
        if (field == PROPERTIES && (value == NULL || value == Py_None))
            value = PyDict_New();
        else
            Py_INCREF(value);
        if (value == NULL)
            return -1;
        PyObject *before = self->fields[field];
        self->fields[field] = value;
        Py_XDECREF(before);
    }
    return 0;
}

static int message_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"topic", "body",        "tag",          "keys",       "properties", "flag",
                            "queue", "delay_level", "sharding_key", "wait_store", "deliver_at_ms", "delay_ms", NULL};
    PyObject *given[FIELDS] = {NULL};
    Py_ssize_t count = PyTuple_Size(arguments);
    if (keywords == NULL && count >= 2 && count <= FIELDS)
        for (Py_ssize_t field = 0; field < count; field++)
            given[field] = PyTuple_GetItem(arguments, field);
    else if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|OOOOOOOOOO:Message", names, &given[0], &given[1],
                                          &given[2], &given[3], &given[4], &given[5], &given[6], &given[7], &given[8],
                                          &given[9], &given[10], &given[11]))
        return -1;
    message *self = (message *)object;
    if (set_fields(self, given) < 0)
        return -1;
    int doubts = has_doubts(self->fields, given[PROPERTIES]);
    if (doubts <= 0)
        return doubts;
    PyObject *checked = PyObject_CallMethod(object, "check", NULL);
    Py_XDECREF(checked);
    return checked == NULL ? -1 : 0;
}

static void message_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    for (int field = 0; field < FIELDS; field++)
        Py_XDECREF(((message *)object)->fields[field]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#define FIELD(name, place) {name, T_OBJECT_EX, offsetof(message, fields) + (place) * sizeof(PyObject *), 0, NULL}

static PyMemberDef message_members[] = {
    FIELD("topic", TOPIC),
    FIELD("body", BODY),
    FIELD("tag", TAG),
    FIELD("keys", KEYS),
    FIELD("properties", PROPERTIES),
    FIELD("flag", FLAG),
    FIELD("queue", QUEUE),
    FIELD("delay_level", DELAY_LEVEL),
    FIELD("sharding_key", SHARDING_KEY),
    FIELD("wait_store", WAIT_STORE),
    FIELD("deliver_at_ms", DELIVER_AT_MS),
    FIELD("delay_ms", DELAY_MS),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot message_slots[] = {
    {Py_tp_init, message_init},
    {Py_tp_dealloc, message_dealloc},
    {Py_tp_members, message_members},
    {0, NULL},
};

static PyType_Spec message_spec = {
    .name = "cometmq.model.Message",
    .basicsize = sizeof(message),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = message_slots,
};

int message_add(PyObject *module)
{
    no_text = PyUnicode_FromStringAndSize(NULL, 0);
    no_keys = PyTuple_New(0);
    number_zero = PyLong_FromLong(0);
    message_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &message_spec, NULL);
    if (no_text == NULL || no_keys == NULL || number_zero == NULL || message_type == NULL)
        return -1;
    return PyModule_AddType(module, message_type); /* our reference stays: is_message needs the type */
}
