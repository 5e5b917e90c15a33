//! The memory that a session, its servers and a model share, as buffers of Python. The one module here with raw memory.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use psjobs_ps::shm::Mapping;
use pyo3::ffi;
use pyo3::prelude::*;

/// One half of a session's memory: all parameters or all gradients, flat f32. It stays mapped while this object, or a
/// tensor that was made of it, lives, also after the session has ended.
#[pyclass(frozen, module = "psjobs._native")]
pub struct Memory {
    start: *mut f32,
    elements: usize,
    /// Keeps the memory mapped.
    _mapping: Arc<Mapping>,
}

// SAFETY: the pointer is into the mapping, which this value holds; through it Python's threads read and write as they do
// in any writable buffer, and Rust makes no slice of it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Returns the parameters and the gradients of `mapping`.
    pub fn halves(mut mapping: Mapping) -> (Self, Self) {
        let elements = mapping.elements();
        let (parameters, gradients) = (mapping.parameters_mut().as_mut_ptr(), mapping.gradients_mut().as_mut_ptr());
        let mapping = Arc::new(mapping);
        let half = |start| Self { start, elements, _mapping: Arc::clone(&mapping) };
        (half(parameters), half(gradients))
    }
}

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.elements
    }

    /// Gives the bytes to who asks for a buffer.
    ///
    /// # Safety
    /// `view` is what Python passes to this slot.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        let (start, length) = (memory.start.cast(), (memory.elements * size_of::<f32>()) as ffi::Py_ssize_t);
        // SAFETY: the memory has this length and is mapped while `slf` lives, to which the view gets a reference.
        match unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, 0, flags) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }
}
