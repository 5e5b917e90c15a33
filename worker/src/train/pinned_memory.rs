//! Pins host memory, so that a GPU copies to and from it by itself. The one module here that calls CUDA.

// The CUDA runtime is called through its C interface; each call says why it is sound.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use libloading::os::unix::{Library, Symbol};
use psjobs_ps::shm::Mapping;
use tch::Device;

/// Memory that is pinned until this is dropped.
#[derive(Debug)]
pub struct PinnedMemory {
    start: *mut c_void,
}

// SAFETY: the pointer is only a name of the memory to the CUDA runtime, which any thread may call.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Pins a session's memory for copies to and from `device`. `None` where the system refuses it, for instance because
    /// of a limit on locked memory: copies are slower then, and right.
    ///
    /// # Safety
    /// The value returned is dropped before `memory`.
    pub unsafe fn pin(memory: &Mapping, device: Device) -> Option<Self> {
        let Device::Cuda(index) = device else { return None };
        let start: *mut c_void = memory.gradients().as_ptr().cast_mut().cast();
        let bytes = memory.elements() * 2 * size_of::<f32>();
        // SAFETY: the types are those of the CUDA runtime's header, and the memory is mapped. Pinning changes none of it.
        // The runtime works in the context of this thread's device, and makes one of device 0 if none was chosen.
        let code = unsafe {
            let set_device: Symbol<unsafe extern "C" fn(c_int) -> c_int> = symbol(b"cudaSetDevice\0")?;
            let register: Symbol<unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int> =
                symbol(b"cudaHostRegister\0")?;
            let forget_error: Symbol<unsafe extern "C" fn() -> c_int> = symbol(b"cudaGetLastError\0")?;
            let code = match set_device(index as c_int) {
                0 => register(start, bytes, 0),
                code => code,
            };
            if code != 0 {
                // libtorch would take it for an error of its own next call.
                forget_error();
            }
            code
        };
        if code != 0 {
            tracing::warn!(
                code,
                bytes,
                "CUDA cannot pin the memory for gradients and parameters, so copies are slower"
            );
            return None;
        }
        Some(Self { start })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: `pin` has pinned it, and it is still mapped. A failure leaves it pinned, which harms nothing.
        unsafe {
            let unregister: Option<Symbol<unsafe extern "C" fn(*mut c_void) -> c_int>> =
                symbol(b"cudaHostUnregister\0");
            if let Some(unregister) = unregister {
                unregister(self.start);
            }
        }
    }
}

/// A function of the CUDA runtime that libtorch has loaded.
///
/// # Safety
/// `T` is its type.
unsafe fn symbol<T>(name: &[u8]) -> Option<Symbol<T>> {
    // SAFETY: the caller's promise is this function's.
    unsafe { Library::this().get(name) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_pins_nothing() {
        let memory = Mapping::new(8).expect("a memory file");
        // No machine has a GPU of this number. The CUDA runtime refuses it, with GPUs and without; where libtorch came
        // without the runtime, nothing is called.
        for device in [Device::Cpu, Device::Cuda(1000)] {
            // SAFETY: what is returned is dropped within the statement.
            let pinned = unsafe { PinnedMemory::pin(&memory, device) }.is_some();
            assert!(!pinned, "{device:?}");
        }
    }
}
