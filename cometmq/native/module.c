/* cometmq.native._accelerator: hot loops over bytes. interface.py tells what each function does, and for whom. */

#include "accelerator.h"

#include "crc32.h"

static PyObject *crc32_by(uint32_t (*compute)(const uint8_t *, size_t), PyObject *object)
{
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    BEGIN_WORK(data.len)
    uint32_t crc = compute(data.buf, (size_t)data.len);
    END_WORK
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *accelerator_crc32(PyObject *module, PyObject *data)
{
    (void)module;
    return crc32_by(crc32_of, data);
}

static PyObject *accelerator_crc32_portable(PyObject *module, PyObject *data)
{
    (void)module;
    return crc32_by(crc32_portable, data);
}

static PyMethodDef methods[] = {
    {"crc32", accelerator_crc32, METH_O, NULL},
    {"crc32_portable", accelerator_crc32_portable, METH_O, NULL},
    {"stamp", accelerator_stamp, METH_VARARGS, NULL},
    {"scan", accelerator_scan, METH_VARARGS, NULL},
    {"decode", accelerator_decode, METH_VARARGS, NULL},
    {"choose", accelerator_choose, METH_VARARGS, NULL},
    {"of_queue", accelerator_of_queue, METH_VARARGS, NULL},
    {"at_places", accelerator_at_places, METH_VARARGS, NULL},
    {"match", accelerator_match, METH_VARARGS, NULL},
    {"encode", (PyCFunction)(void (*)(void))accelerator_encode, METH_FASTCALL, NULL},
    {"encode_run", accelerator_encode_run, METH_VARARGS, NULL},
    {"index_keys", accelerator_index_keys, METH_VARARGS, NULL},
    {"index_put", accelerator_index_put, METH_VARARGS, NULL},
    {"timer_entries", accelerator_timer_entries, METH_VARARGS, NULL},
    {"sort_timers", accelerator_sort_timers, METH_O, NULL},
    {"delivery_targets", accelerator_delivery_targets, METH_VARARGS, NULL},
    {"half_targets", accelerator_half_targets, METH_VARARGS, NULL},
    {"half_run", accelerator_half_run, METH_VARARGS, NULL},
    {"relay", accelerator_relay, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    crc32_prepare();
    if (levels_add(module) < 0 || received_add(module) < 0 || message_add(module) < 0 || sent_add(module) < 0
        || run_add(module) < 0 || trace_add(module) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "CRC32", crc32_is_folded() ? "pclmulqdq" : "tables");
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cometmq.native._accelerator",
    .m_doc = "Hot loops over bytes; see cometmq/native/interface.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__accelerator(void)
{
    return PyModuleDef_Init(&definition);
}
