/* What becomes of messages that were sent one by one: cometmq/client/sending/batcher.py.
 *
 * A batch decides ranges of them, and a future looks its range up when somebody asks. So deciding a thousand messages is
 * one step. A future that somebody waits for, or that has callbacks, becomes a front of a future of asyncio (`inner`),
 * which does the rest. The garbage collector looks at those, and at all once a message has failed: nothing else here
 * refers to what applications hold. */

#include "sent.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

static PyTypeObject *receipt_type, *each_type, *future_type, *callback_type;

/* --- receipts ----------------------------------------------------------------------------------------------------- */

/* cometmq/client/messages.py, which also adds what is not hot. */
typedef struct {
    PyObject_HEAD
    PyObject *run;
    Py_ssize_t index;
} receipt;

static PyObject *new_receipt(PyTypeObject *type, PyObject *run, Py_ssize_t index)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    receipt *self = (receipt *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->run = Py_NewRef(run);
    self->index = index;
    return (PyObject *)self;
}

static PyObject *receipt_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"run", "index", NULL};
    PyObject *run;
    Py_ssize_t index;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "On:SendReceipt", names, &run, &index))
        return NULL;
    return new_receipt(type, run, index);
}

static void receipt_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((receipt *)object)->run);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMemberDef receipt_members[] = {
    {"_run", T_OBJECT, offsetof(receipt, run), READONLY, NULL},
    {"_index", T_PYSSIZET, offsetof(receipt, index), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot receipt_slots[] = {
    {Py_tp_new, receipt_new},
    {Py_tp_dealloc, receipt_dealloc},
    {Py_tp_members, receipt_members},
    {0, NULL},
};

static PyType_Spec receipt_spec = {
    .name = "cometmq.client.messages.SendReceipt",
    .basicsize = sizeof(receipt),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = receipt_slots,
};

/* --- the messages of a run ---------------------------------------------------------------------------------------- */

/* What became of messages that follow each other. */
typedef struct {
    Py_ssize_t first, count, index; /* the first one's place in the StoredRun */
    PyObject *found;                /* the StoredRun, or the error */
    PyObject *trace;                /* of the error when it came; else NULL */
    int is_error;
} outcome;

typedef struct send_future send_future;

typedef struct send_each {
    PyObject_HEAD
    PyObject *loop;
    PyObject *decided;  /* a future of asyncio; NULL until somebody wants it */
    PyObject *watched;  /* a list of the futures that have an inner one; NULL: none has */
    outcome *outcomes;
    Py_ssize_t outcome_count, count, decided_count;
    Py_ssize_t unseen_count; /* errors that no application has looked at */
    int is_whole;            /* no more messages are taken */
    int has_failed;          /* some of them have */
    send_future *futures;    /* all that are there, not counted as references */
} send_each;

struct send_future {
    PyObject_HEAD
    send_each *each;
    send_future *next, *previous; /* of the same messages */
    PyObject *inner;   /* a future of asyncio; NULL until somebody waits */
    PyObject *receipt; /* NULL until somebody looks at it */
    uint32_t place;
    int is_seen; /* its error */
    PyObject *weak;
};

int is_send_each(PyObject *object)
{
    return Py_TYPE(object) == each_type;
}

static const outcome *outcome_of(const send_each *each, Py_ssize_t place)
{
    for (Py_ssize_t at = 0; at < each->outcome_count; at++)
        if (place - each->outcomes[at].first >= 0 && place - each->outcomes[at].first < each->outcomes[at].count)
            return &each->outcomes[at];
    return NULL;
}

/* Calls method(argument) of a future of asyncio unless it is done; 0 with an exception set. */
static int decide(PyObject *future, const char *method, PyObject *argument)
{
    PyObject *done = PyObject_CallMethod(future, "done", NULL);
    int is_done = done == NULL ? -1 : PyObject_IsTrue(done);
    Py_XDECREF(done);
    if (is_done != 0)
        return is_done > 0;
    PyObject *nothing = PyObject_CallMethod(future, method, "O", argument);
    Py_XDECREF(nothing);
    return nothing != NULL;
}

static PyObject *receipt_at(const outcome *found, Py_ssize_t place)
{
    return new_receipt(receipt_type, found->found, found->index + place - found->first);
}

/* Gives the inner future what became of the message; 0 with an exception set. */
static int decide_inner(send_future *future, const outcome *found)
{
    if (found->is_error)
        return decide(future->inner, "set_exception", found->found);
    if (future->receipt == NULL && (future->receipt = receipt_at(found, future->place)) == NULL)
        return 0;
    return decide(future->inner, "set_result", future->receipt);
}

/* The inner futures of messages that are decided by now. */
static int decide_watched(send_each *self)
{
    if (self->watched == NULL)
        return 1;
    PyObject *before = self->watched;
    self->watched = PyList_New(0);
    int is_good = self->watched != NULL;
    for (Py_ssize_t at = 0; is_good && at < PyList_Size(before); at++) {
        send_future *future = (send_future *)PyList_GetItem(before, at);
        const outcome *found = outcome_of(self, future->place);
        is_good = found == NULL ? PyList_Append(self->watched, (PyObject *)future) == 0 : decide_inner(future, found);
    }
    Py_DECREF(before);
    return is_good;
}

static int decide_all(send_each *self)
{
    if (self->decided == NULL || !self->is_whole || self->decided_count < self->count)
        return 1;
    return decide(self->decided, "set_result", Py_None);
}

/* The garbage collector looks at the future from now on. */
static void track(send_future *future)
{
    if (!PyObject_GC_IsTracked((PyObject *)future))
        PyObject_GC_Track((PyObject *)future);
}

/* An error refers to the frames that it was raised through, and these to futures: only the collector frees them then. */
static void track_all(send_each *self)
{
    if (self->has_failed)
        return;
    self->has_failed = 1;
    for (send_future *future = self->futures; future != NULL; future = future->next)
        track(future);
}

/* Takes the outcome of messages; the watched ones among them are looked at here, and no others. */
static PyObject *take_outcome(send_each *self, Py_ssize_t first, Py_ssize_t count, PyObject *found, Py_ssize_t index,
                              int is_error)
{
    if (first < 0 || count <= 0 || first > self->count - count || outcome_of(self, first) != NULL
        || outcome_of(self, first + count - 1) != NULL)
        return PyErr_Format(PyExc_ValueError, "messages %zd to %zd are not there, or decided", first, first + count);
    size_t bytes = sizeof(outcome) * (size_t)(self->outcome_count + 1);
    outcome *outcomes = PyMem_Realloc(self->outcomes, bytes);
    if (outcomes == NULL)
        return PyErr_NoMemory();
    self->outcomes = outcomes;
    PyObject *trace = is_error ? PyException_GetTraceback(found) : NULL;
    outcomes[self->outcome_count++] = (outcome){first, count, index, Py_NewRef(found), trace, is_error};
    self->decided_count += count;
    if (is_error) {
        self->unseen_count += count;
        track_all(self);
    }
    for (Py_ssize_t at = 0; is_error && self->watched != NULL && at < PyList_Size(self->watched); at++) {
        send_future *future = (send_future *)PyList_GetItem(self->watched, at);
        if (outcome_of(self, future->place) == &outcomes[self->outcome_count - 1]) {
            future->is_seen = 1; /* asyncio watches over the inner one's */
            self->unseen_count--;
        }
    }
    if (!decide_watched(self) || !decide_all(self))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *each_stored(PyObject *object, PyObject *arguments)
{
    Py_ssize_t first, count, index;
    PyObject *run;
    if (!PyArg_ParseTuple(arguments, "nnOn:stored", &first, &count, &run, &index))
        return NULL;
    return take_outcome((send_each *)object, first, count, run, index, 0);
}

static PyObject *each_failed(PyObject *object, PyObject *arguments)
{
    Py_ssize_t first, count;
    PyObject *error;
    if (!PyArg_ParseTuple(arguments, "nnO:failed", &first, &count, &error))
        return NULL;
    if (!PyExceptionInstance_Check(error))
        return PyErr_Format(PyExc_TypeError, "messages fail with an exception, not with %R", error);
    return take_outcome((send_each *)object, first, count, error, 0, 1);
}

static PyObject *each_decided(PyObject *object, void *nothing)
{
    (void)nothing;
    send_each *self = (send_each *)object;
    if (self->decided == NULL) {
        self->decided = PyObject_CallMethod(self->loop, "create_future", NULL);
        if (self->decided == NULL || !decide_all(self))
            return NULL;
    }
    return Py_NewRef(self->decided);
}

PyObject *send_each_take(PyObject *object)
{
    send_each *each = (send_each *)object;
    send_future *future = PyObject_GC_New(send_future, future_type);
    if (future == NULL)
        return NULL;
    future->each = (send_each *)Py_NewRef(object);
    future->inner = future->receipt = future->weak = NULL;
    future->place = (uint32_t)each->count++;
    future->is_seen = 0;
    future->previous = NULL;
    future->next = each->futures;
    if (each->futures != NULL)
        each->futures->previous = future;
    each->futures = future;
    if (each->has_failed)
        track(future);
    return (PyObject *)future; /* else not tracked: it refers to nothing of the application's */
}

static PyObject *each_take(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    send_each *self = (send_each *)object;
    if (self->is_whole || self->count == UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "no more messages are taken");
    return send_each_take(object);
}

int send_each_end(PyObject *object)
{
    send_each *self = (send_each *)object;
    self->is_whole = 1;
    return decide_all(self);
}

static PyObject *each_end(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    return send_each_end(object) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *each_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *loop;
    if (keywords != NULL || !PyArg_ParseTuple(arguments, "O:SendEach", &loop))
        return keywords == NULL ? NULL : PyErr_Format(PyExc_TypeError, "SendEach takes no keywords");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    send_each *self = (send_each *)allocate(type, 0);
    if (self != NULL)
        self->loop = Py_NewRef(loop);
    return (PyObject *)self;
}

static int each_traverse(PyObject *object, visitproc visit, void *arg)
{
    send_each *self = (send_each *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->loop);
    Py_VISIT(self->decided);
    Py_VISIT(self->watched);
    for (Py_ssize_t at = 0; at < self->outcome_count; at++) {
        Py_VISIT(self->outcomes[at].found);
        Py_VISIT(self->outcomes[at].trace);
    }
    return 0;
}

static int each_clear(PyObject *object)
{
    send_each *self = (send_each *)object;
    Py_CLEAR(self->watched);
    Py_CLEAR(self->decided);
    return 0;
}

/* As asyncio tells of a future whose error nobody looked at; here it is told once for all of them. */
static void tell_unseen(send_each *self)
{
    PyObject *kind, *value, *trace, *error = NULL;
    PyErr_Fetch(&kind, &value, &trace);
    for (Py_ssize_t at = 0; error == NULL && at < self->outcome_count; at++)
        if (self->outcomes[at].is_error)
            error = self->outcomes[at].found;
    PyObject *text = PyUnicode_FromFormat("SendFuture exception was never retrieved, of %zd messages",
                                          self->unseen_count);
    PyObject *context = text == NULL ? NULL : Py_BuildValue("{sOsO}", "message", text, "exception", error);
    PyObject *told = context == NULL ? NULL : PyObject_CallMethod(self->loop, "call_exception_handler", "O", context);
    if (told == NULL)
        PyErr_WriteUnraisable(self->loop);
    Py_XDECREF(told);
    Py_XDECREF(context);
    Py_XDECREF(text);
    PyErr_Restore(kind, value, trace);
}

/* The collector calls it before it takes errors to pieces. */
static void each_finalize(PyObject *object)
{
    send_each *self = (send_each *)object;
    if (self->unseen_count > 0)
        tell_unseen(self);
    self->unseen_count = 0;
}

static void each_dealloc(PyObject *object)
{
    send_each *self = (send_each *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    each_finalize(object);
    each_clear(object);
    for (Py_ssize_t at = 0; at < self->outcome_count; at++) {
        Py_DECREF(self->outcomes[at].found);
        Py_XDECREF(self->outcomes[at].trace);
    }
    PyMem_Free(self->outcomes);
    Py_XDECREF(self->loop);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef each_methods[] = {
    {"take", each_take, METH_NOARGS, NULL},
    {"end", each_end, METH_NOARGS, NULL},
    {"stored", each_stored, METH_VARARGS, NULL},
    {"failed", each_failed, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef each_members[] = {
    {"count", T_PYSSIZET, offsetof(send_each, count), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef each_fields[] = {
    {"decided", each_decided, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot each_slots[] = {
    {Py_tp_new, each_new},
    {Py_tp_dealloc, each_dealloc},
    {Py_tp_finalize, each_finalize},
    {Py_tp_traverse, each_traverse},
    {Py_tp_clear, each_clear},
    {Py_tp_methods, each_methods},
    {Py_tp_members, each_members},
    {Py_tp_getset, each_fields},
    {0, NULL},
};

static PyType_Spec each_spec = {
    .name = "cometmq.native._accelerator.SendEach",
    .basicsize = sizeof(send_each),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = each_slots,
};

/* --- futures ------------------------------------------------------------------------------------------------------ */

/* Marks its error as looked at. */
static void see(send_future *self)
{
    if (!self->is_seen) {
        self->is_seen = 1;
        self->each->unseen_count--;
    }
}

/* Makes the inner future, if there is none yet; 0 with an exception set. */
static int watch(send_future *self)
{
    if (self->inner != NULL)
        return 1;
    send_each *each = self->each;
    if (each->watched == NULL && (each->watched = PyList_New(0)) == NULL)
        return 0;
    PyObject *inner = PyObject_CallMethod(each->loop, "create_future", NULL);
    if (inner == NULL)
        return 0;
    self->inner = inner;
    track(self);
    const outcome *found = outcome_of(each, self->place);
    if (found == NULL)
        return PyList_Append(each->watched, (PyObject *)self) == 0;
    if (found->is_error)
        see(self);
    return decide_inner(self, found);
}

/* Its result, or the error set; NULL too while it is not decided, without any. For futures without an inner one. */
static PyObject *result_now(send_future *self)
{
    const outcome *found = outcome_of(self->each, self->place);
    if (found == NULL)
        return NULL;
    if (found->is_error) {
        see(self);
        /* Many messages share it: it would grow by a frame each time. */
        PyException_SetTraceback(found->found, found->trace == NULL ? Py_None : found->trace);
        PyErr_SetObject((PyObject *)Py_TYPE(found->found), found->found);
        return NULL;
    }
    if (self->receipt == NULL)
        self->receipt = receipt_at(found, self->place);
    return Py_XNewRef(self->receipt);
}

static PyObject *ask_inner(send_future *self, const char *method)
{
    return watch(self) ? PyObject_CallMethod(self->inner, method, NULL) : NULL;
}

static PyObject *future_result(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    send_future *self = (send_future *)object;
    if (self->inner == NULL) {
        PyObject *result = result_now(self);
        if (result != NULL || PyErr_Occurred())
            return result;
    }
    return ask_inner(self, "result"); /* which knows what is wrong */
}

static PyObject *future_exception(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    send_future *self = (send_future *)object;
    const outcome *found = self->inner == NULL ? outcome_of(self->each, self->place) : NULL;
    if (found == NULL)
        return ask_inner(self, "exception");
    if (!found->is_error)
        Py_RETURN_NONE;
    see(self);
    return Py_NewRef(found->found);
}

static PyObject *future_done(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    send_future *self = (send_future *)object;
    if (self->inner != NULL)
        return ask_inner(self, "done");
    return PyBool_FromLong(outcome_of(self->each, self->place) != NULL);
}

static PyObject *future_cancelled(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    send_future *self = (send_future *)object;
    return self->inner == NULL ? Py_NewRef(Py_False) : ask_inner(self, "cancelled");
}

static PyObject *future_cancel(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"msg", NULL};
    send_future *self = (send_future *)object;
    PyObject *reason = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|O:cancel", names, &reason))
        return NULL;
    if (self->inner == NULL && outcome_of(self->each, self->place) != NULL)
        Py_RETURN_FALSE;
    return watch(self) ? PyObject_CallMethod(self->inner, "cancel", "O", reason) : NULL;
}

static PyObject *future_get_loop(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    return Py_NewRef(((send_future *)object)->each->loop);
}

static PyObject *new_callback(PyObject *function, PyObject *future);

static PyObject *future_add_done_callback(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"", "context", NULL};
    send_future *self = (send_future *)object;
    PyObject *function, *context = NULL;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|$O:add_done_callback", names, &function, &context)
        || !watch(self))
        return NULL;
    PyObject *method = PyObject_GetAttrString(self->inner, "add_done_callback");
    PyObject *with = context == NULL ? NULL : Py_BuildValue("{sO}", "context", context);
    PyObject *positional = Py_BuildValue("(N)", new_callback(function, object));
    PyObject *nothing = NULL;
    if (method != NULL && positional != NULL && !PyErr_Occurred())
        nothing = PyObject_Call(method, positional, with);
    Py_XDECREF(method);
    Py_XDECREF(with);
    Py_XDECREF(positional);
    return nothing;
}

static PyObject *future_remove_done_callback(PyObject *object, PyObject *function)
{
    send_future *self = (send_future *)object;
    if (self->inner == NULL)
        return PyLong_FromLong(0);
    return PyObject_CallMethod(self->inner, "remove_done_callback", "O", function);
}

/* What `await` steps through: a decided future itself, else the inner one. */
static PyObject *future_await(PyObject *object)
{
    send_future *self = (send_future *)object;
    if (self->inner == NULL && outcome_of(self->each, self->place) != NULL)
        return Py_NewRef(object);
    return watch(self) ? PyObject_CallMethod(self->inner, "__await__", NULL) : NULL;
}

static PySendResult future_step(PyObject *object, PyObject *value, PyObject **result)
{
    (void)value;
    *result = future_result(object, NULL);
    return *result == NULL ? PYGEN_ERROR : PYGEN_RETURN;
}

static PyObject *future_next(PyObject *object)
{
    PyObject *result = future_result(object, NULL);
    if (result != NULL) {
        PyErr_SetObject(PyExc_StopIteration, result);
        Py_DECREF(result);
    }
    return NULL;
}

static PyObject *future_blocking(PyObject *object, void *nothing)
{
    (void)object;
    (void)nothing;
    Py_RETURN_FALSE; /* asyncio looks for the attribute: it makes this a future */
}

/* What asyncio.gather looks at beside the methods. */
static PyObject *future_inner_field(PyObject *object, void *name)
{
    send_future *self = (send_future *)object;
    return watch(self) ? PyObject_GetAttrString(self->inner, name) : NULL;
}

static PyObject *future_repr(PyObject *object)
{
    send_future *self = (send_future *)object;
    if (self->inner != NULL)
        return PyUnicode_FromFormat("<SendFuture of %R>", self->inner);
    const outcome *found = outcome_of(self->each, self->place);
    if (found == NULL)
        return PyUnicode_FromString("<SendFuture pending>");
    if (found->is_error)
        return PyUnicode_FromFormat("<SendFuture finished exception=%R>", found->found);
    PyObject *result = result_now(self);
    PyObject *text = result == NULL ? NULL : PyUnicode_FromFormat("<SendFuture finished result=%R>", result);
    Py_XDECREF(result);
    return text;
}

static int future_traverse(PyObject *object, visitproc visit, void *arg)
{
    send_future *self = (send_future *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->each);
    Py_VISIT(self->inner);
    Py_VISIT(self->receipt);
    return 0;
}

static int future_clear(PyObject *object)
{
    Py_CLEAR(((send_future *)object)->inner);
    return 0;
}

static void future_dealloc(PyObject *object)
{
    send_future *self = (send_future *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weak != NULL)
        PyObject_ClearWeakRefs(object);
    if (self->previous != NULL)
        self->previous->next = self->next;
    else
        self->each->futures = self->next;
    if (self->next != NULL)
        self->next->previous = self->previous;
    Py_XDECREF(self->inner);
    Py_XDECREF(self->receipt);
    Py_XDECREF((PyObject *)self->each);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef future_methods[] = {
    {"result", future_result, METH_NOARGS, NULL},
    {"exception", future_exception, METH_NOARGS, NULL},
    {"done", future_done, METH_NOARGS, NULL},
    {"cancelled", future_cancelled, METH_NOARGS, NULL},
    {"cancel", (PyCFunction)(void (*)(void))future_cancel, METH_VARARGS | METH_KEYWORDS, NULL},
    {"get_loop", future_get_loop, METH_NOARGS, NULL},
    {"add_done_callback", (PyCFunction)(void (*)(void))future_add_done_callback, METH_VARARGS | METH_KEYWORDS, NULL},
    {"remove_done_callback", future_remove_done_callback, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef future_fields[] = {
    {"_asyncio_future_blocking", future_blocking, NULL, NULL, NULL},
    {"_cancel_message", future_inner_field, NULL, NULL, "_cancel_message"},
    {"_make_cancelled_error", future_inner_field, NULL, NULL, "_make_cancelled_error"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef future_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(send_future, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot future_slots[] = {
    {Py_tp_dealloc, future_dealloc},
    {Py_tp_traverse, future_traverse},
    {Py_tp_clear, future_clear},
    {Py_tp_repr, future_repr},
    {Py_tp_iter, future_await},
    {Py_tp_iternext, future_next},
    {Py_am_await, future_await},
    {Py_am_send, future_step},
    {Py_tp_methods, future_methods},
    {Py_tp_members, future_members},
    {Py_tp_getset, future_fields},
    {0, NULL},
};

static PyType_Spec future_spec = {
    .name = "cometmq.client.SendFuture",
    .basicsize = sizeof(send_future),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = future_slots,
};

/* --- callbacks ---------------------------------------------------------------------------------------------------- */

/* A callback of an inner future that calls one of ours, with our future. They count as the same. */
typedef struct {
    PyObject_HEAD
    PyObject *function, *future;
} callback;

static PyObject *new_callback(PyObject *function, PyObject *future)
{
    callback *self = PyObject_GC_New(callback, callback_type);
    if (self == NULL)
        return NULL;
    self->function = Py_NewRef(function);
    self->future = Py_NewRef(future);
    PyObject_GC_Track((PyObject *)self);
    return (PyObject *)self;
}

static PyObject *callback_call(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    (void)arguments;
    (void)keywords;
    callback *self = (callback *)object;
    return PyObject_CallFunctionObjArgs(self->function, self->future, NULL);
}

static PyObject *callback_compare(PyObject *object, PyObject *other, int operation)
{
    return PyObject_RichCompare(((callback *)object)->function, other, operation);
}

static PyObject *callback_repr(PyObject *object)
{
    return PyObject_Repr(((callback *)object)->function);
}

static int callback_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((callback *)object)->function);
    Py_VISIT(((callback *)object)->future);
    return 0;
}

static int callback_clear(PyObject *object)
{
    (void)object; /* the future that refers to it is cleared */
    return 0;
}

static void callback_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_DECREF(((callback *)object)->function);
    Py_DECREF(((callback *)object)->future);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyType_Slot callback_slots[] = {
    {Py_tp_dealloc, callback_dealloc},
    {Py_tp_traverse, callback_traverse},
    {Py_tp_clear, callback_clear},
    {Py_tp_call, callback_call},
    {Py_tp_richcompare, callback_compare},
    {Py_tp_repr, callback_repr},
    {0, NULL},
};

static PyType_Spec callback_spec = {
    .name = "cometmq.native._accelerator.SendCallback",
    .basicsize = sizeof(callback),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = callback_slots,
};

/* Adds a type to the module; NULL with an exception set. Our reference stays: new objects need it. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return type == NULL || PyModule_AddType(module, type) < 0 ? NULL : type;
}

int sent_add(PyObject *module)
{
    receipt_type = add_type(module, &receipt_spec);
    each_type = add_type(module, &each_spec);
    future_type = add_type(module, &future_spec);
    callback_type = add_type(module, &callback_spec);
    return receipt_type == NULL || each_type == NULL || future_type == NULL || callback_type == NULL ? -1 : 0;
}
