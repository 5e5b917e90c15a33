//! A memory file that holds `[gradients | parameters]`, both flat f32 of the same length, mapped
//! by the trainer and by each server of its host. The one module of this crate with raw memory.
//!
//! The two sides alternate: the trainer writes gradients and reads parameters until it sends a
//! step's frames or begins a pull, the server reads those gradients and writes those parameters until
//! it answers, or the pull is over. A trainer's own streams write parameters as a server does, through a second
//! mapping, from a gradient's departure until its answer is complete or the exchange ends (`client/landing.rs`).
//! Every bit pattern is a valid f32, and no length or index is ever read from the memory, so a
//! trainer that breaks this order spoils its own numbers and nothing else.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The mapped memory. It does not move and cannot shrink while this lives.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<f32>,
    elements: usize,
    file: OwnedFd,
}

// SAFETY: the mapping belongs to this value and is reached through it alone; it is as free to move
// between threads as a Vec<f32>.
unsafe impl Send for Mapping {}
// SAFETY: through `&self` one can read, and write parameters by `fill_parameters`, whose callers
// (the owner tasks of blocks, or the streams of a trainer) write disjoint ranges, while the trainer waits.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory for `elements` gradients and as many parameters, all zero.
    ///
    /// # Errors
    /// If the system grants no memory file of that size.
    pub fn new(elements: usize) -> io::Result<Self> {
        let file = memfd_create("psjobs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes(elements)? as u64)?;
        // A mapped file that shrinks would kill a process that touches the part that is gone.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, elements)
    }

    /// Maps a file that a trainer made with [`Mapping::new`].
    ///
    /// # Errors
    /// If the file has another size or could shrink.
    pub fn receive(file: OwnedFd, elements: usize) -> io::Result<Self> {
        let (want, found) = (bytes(elements)?, fstat(&file)?.st_size as u64);
        if found != want as u64 {
            return Err(io::Error::other(format!("the memory file has {found} bytes, the model needs {want}")));
        }
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("the memory file is not sealed against shrinking"));
        }
        Self::map(file, elements)
    }

    fn map(file: OwnedFd, elements: usize) -> io::Result<Self> {
        let length = bytes(elements)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing; the file has
        // this length and is sealed against shrinking.
        let base = unsafe {
            mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, elements, file })
    }

    /// Length of either half.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The file, to hand on.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// All gradients.
    #[must_use]
    pub fn gradients(&self) -> &[f32] {
        // SAFETY: the first half of the mapping; page-aligned, so aligned for f32; lives as long as self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.elements) }
    }

    /// All gradients, for the trainer to fill.
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        // SAFETY: as `gradients`; `&mut self` makes it the only slice of this process.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.elements) }
    }

    /// All parameters.
    #[must_use]
    pub fn parameters(&self) -> &[f32] {
        // SAFETY: the second half of the mapping; see `gradients`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(self.elements), self.elements) }
    }

    /// All parameters, for the trainer to fill.
    pub fn parameters_mut(&mut self) -> &mut [f32] {
        // SAFETY: as `parameters`; `&mut self` makes it the only slice of this process.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(self.elements), self.elements) }
    }

    /// All gradients, to change, beside all parameters, to read.
    pub fn gradients_and_parameters(&mut self) -> (&mut [f32], &[f32]) {
        // SAFETY: as `gradients_mut` and `parameters`: two halves of the mapping, which do not overlap.
        unsafe {
            let gradients = std::slice::from_raw_parts_mut(self.base.as_ptr(), self.elements);
            (gradients, std::slice::from_raw_parts(self.base.as_ptr().add(self.elements), self.elements))
        }
    }

    /// Gradients of `range` as the optimizers take them.
    ///
    /// # Panics
    /// If `range` is not within the model.
    #[must_use]
    pub fn gradient_bytes(&self, range: Range<usize>) -> &[[u8; 4]] {
        let gradients = &self.gradients()[range];
        // SAFETY: an f32 is four bytes, and bytes need no alignment.
        unsafe { std::slice::from_raw_parts(gradients.as_ptr().cast(), gradients.len()) }
    }

    /// Writes parameters from `start` on, for a trainer that waits for them.
    ///
    /// # Panics
    /// If they do not fit within the model.
    pub fn write_parameters(&self, start: usize, values: &[f32]) {
        self.fill_parameters(start, values.len(), |target| target.copy_from_slice(values));
    }

    /// Lets `fill` write `elements` parameters from `start` on, for a trainer that waits for them. No two threads fill the
    /// same ones at a time, and no slice of this mapping's parameters exists meanwhile.
    ///
    /// # Panics
    /// If they do not fit within the model.
    pub fn fill_parameters(&self, start: usize, elements: usize, fill: impl FnOnce(&mut [f32])) {
        assert!(start.checked_add(elements).is_some_and(|end| end <= self.elements), "parameters within the model");
        // SAFETY: checked to be within the second half. Whoever calls this makes no other slice of that half of this mapping,
        // and a block is filled by one thread at a time (its owner task, or its stream under the lock of its `Landing`), so
        // nothing else reaches these elements through this mapping. Another process, or the trainer's first mapping, may look
        // at the same memory: see above.
        fill(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(self.elements + start), elements) });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let length = self.elements * 8;
        // SAFETY: this is the mapping that `map` made, with the length checked there; no slice of it
        // outlives self.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), length) } {
            tracing::error!(%error, "cannot unmap shared memory");
        }
    }
}

fn bytes(elements: usize) -> io::Result<usize> {
    let length = elements.checked_mul(8).filter(|length| *length > 0 && *length < isize::MAX as usize);
    length.ok_or_else(|| io::Error::other(format!("{elements} parameters do not fit the address space")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_are_one_memory() {
        let mut trainer = Mapping::new(1000).expect("a memory file");
        let server = Mapping::receive(trainer.file().try_clone_to_owned().expect("a handle"), 1000).expect("maps");
        trainer.gradients_mut()[10] = 1.5;
        assert_eq!(server.gradient_bytes(10..11), [1.5_f32.to_le_bytes()]);
        server.write_parameters(998, &[2.5, 3.5]);
        assert_eq!(trainer.parameters()[997..], [0.0, 2.5, 3.5]);
    }

    #[test]
    fn a_file_that_does_not_fit_is_refused() {
        let small = Mapping::new(10).expect("a memory file").file().try_clone_to_owned().expect("a handle");
        let error = Mapping::receive(small, 11).expect_err("too small").to_string();
        assert!(error.contains("80 bytes") && error.contains("88"), "{error}");
        let file = memfd_create("loose", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, 80).expect("grows");
        let error = Mapping::receive(file, 10).expect_err("could shrink").to_string();
        assert!(error.contains("sealed"), "{error}");
    }
}
