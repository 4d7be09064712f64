//! Where tensor memory is: on the host, or on a device that only its own copy functions reach.
//!
//! A [`Device`] is the seam: this crate names no device. The trivial implementation to read first is the toy device of the
//! contract tests, whose memory the host cannot read.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Memory that the host cannot address, and how to copy it. A [`super::Region`] on the host has none.
///
/// Both copies return when the bytes are in place. They run on the thread that calls a verb and on communication threads.
///
/// A bucket has one device value for all its tensors, which lives as long as they are registered: the methods without a default are all
/// that other operations need. A stream is a number by which the device knows an order of work, `None` the one that it takes by itself.
///
/// `Any`, so that a collective of another crate finds its own device behind the reference.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// Name for errors and reports, e.g. "toy:0".
    fn name(&self) -> &str;

    /// Which kind of device, never 0 (the host). Ranks compare it: it is part of an operation's fingerprint.
    fn kind(&self) -> u8;

    /// Copies `into.len()` bytes from device memory to the host.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Safety
    /// The bytes at `from` are memory of this device, valid for reading, and not written during the copy.
    unsafe fn copy_to_host(&self, from: NonNull<u8>, into: &mut [u8]) -> Result<()>;

    /// Copies `from` to device memory.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Safety
    /// The `from.len()` bytes at `to` are memory of this device, valid for writing, and nothing else uses them during the copy.
    unsafe fn copy_from_host(&self, from: &[u8], to: NonNull<u8>) -> Result<()>;

    /// Makes what operations on a bucket need on the device. On the communication thread, when the bucket is registered.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// What operations do with the bucket next comes after the work that `stream` has now. On the thread that marks a tensor as ready, which
    /// must not wait for the device; the order of work is the only effect, and there is none after an error.
    ///
    /// # Errors
    /// `NotImplemented` for a stream that cannot be followed; whatever the device reports.
    fn mark(&self, stream: Option<usize>) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Work that `stream` gets from now on comes after what was marked and what operations did with the bucket. Must not wait for the
    /// device.
    ///
    /// # Errors
    /// As [`Device::mark`].
    fn order(&self, stream: Option<usize>) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Whether the device has done what was marked, so that a copy would not wait for other work. Does not wait.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }

    /// A mark behind the device's work on the bucket so far, and what the next operation comes after: to time operations by. On the
    /// communication thread. `None` where the work is done when the calls return.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn stamp(&self) -> Result<Option<Box<dyn Stamp>>> {
        Ok(None)
    }

    /// The operations of one communication of the bucket are over, as far as the communication thread, which calls this, is concerned.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// The communication thread ends, which calls this: lets go of what [`Device::prepare`] made, and may wait for the device.
    fn end(&self) {}

    /// Copies buffers one after another into memory of the device's own, and returns where that is: the caller's until the next `gather`.
    /// `None` where the device has none; nothing was copied then.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Safety
    /// Each is as many bytes of memory of this device, valid for reading, and not written until what operations did next is done.
    unsafe fn gather(&self, from: &[(NonNull<u8>, usize)]) -> Result<Option<NonNull<u8>>> {
        let _ = from;
        Ok(None)
    }

    /// Copies what lies one after another where the last `gather` put it back into buffers, behind the operations on it.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Safety
    /// Each is as many bytes of memory of this device, together as many as were gathered, valid for writing, and nothing else uses them
    /// until the copies are done.
    unsafe fn scatter(&self, to: &[(NonNull<u8>, usize)]) -> Result<()> {
        let _ = to;
        Ok(())
    }

    /// So many bytes of the device's own, of which nothing is known, for steps of the operation that runs: the caller's until the next call.
    /// `gather` does not use them.
    ///
    /// # Errors
    /// `NotImplemented` for a device that has none; whatever the device reports.
    fn room(&self, len: usize) -> Result<NonNull<u8>> {
        Err(Error::NotImplemented(format!("{len} bytes of {} for an operation", self.name())))
    }

    /// Copies `len` bytes within the device, as a step of the operation that runs: on the communication thread.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Safety
    /// Both are memory of this device, apart from each other, valid, and nothing else uses them until what operations did next is done.
    unsafe fn copy_in_operation(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) -> Result<()> {
        let mut host = vec![0; len];
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_to_host(from, &mut host)?;
            self.copy_from_host(&host, to)
        }
    }

    /// Copies `len` bytes within the device, as work of `stream` behind what [`Device::order`] names.
    ///
    /// # Errors
    /// As [`Device::mark`].
    ///
    /// # Safety
    /// Both are memory of this device, apart from each other, valid, and nothing else uses them until the stream has come so far.
    unsafe fn copy_within(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize, stream: Option<usize>) -> Result<()> {
        let _ = stream;
        let mut host = vec![0; len];
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_to_host(from, &mut host)?;
            self.copy_from_host(&host, to)
        }
    }
}

/// A mark in a device's work, see [`Device::stamp`].
pub trait Stamp: Any + Send {
    /// Seconds from this mark to a later one of the same device. Waits until the device has come to that.
    ///
    /// # Errors
    /// Whatever the device reports; the first cause of the group's failure.
    fn seconds_to(&self, later: &dyn Stamp) -> Result<f64>;
}

/// A device, or `None` for the host.
pub type DeviceRef<'a> = Option<&'a Arc<dyn Device>>;

/// The kind that a fingerprint carries: 0 for the host.
#[inline]
pub fn kind_of(place: DeviceRef<'_>) -> u8 {
    place.map_or(0, |device| device.kind())
}

/// Whether both are on the host, or on the same device.
#[inline]
pub fn same_place(one: DeviceRef<'_>, other: DeviceRef<'_>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

/// The name of a place, for error texts.
pub fn name_of(place: DeviceRef<'_>) -> &str {
    place.map_or("the host", |device| device.name())
}

/// The error for device memory where only host memory can be used.
fn not_on_host(device: &dyn Device) -> Error {
    Error::UnsupportedType(format!("the tensor is on {}, and host memory is needed here", device.name()))
}

/// Bytes to read, on the host or on a device.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    /// First byte; dangling when `len` is 0.
    ptr: NonNull<u8>,
    len: usize,
    device: DeviceRef<'a>,
    borrowed: PhantomData<&'a [u8]>,
}

// SAFETY: a Buffer is a shared borrow, like `&[u8]`; devices are `Sync`.
unsafe impl Send for Buffer<'_> {}
// SAFETY: as above.
unsafe impl Sync for Buffer<'_> {}

impl<'a> From<&'a [u8]> for Buffer<'a> {
    #[inline]
    fn from(host: &'a [u8]) -> Buffer<'a> {
        Buffer { ptr: NonNull::from(host).cast(), len: host.len(), device: None, borrowed: PhantomData }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Buffer<'a> {
    #[inline]
    fn from(host: &'a [u8; N]) -> Buffer<'a> {
        Buffer::from(host.as_slice())
    }
}

impl<'a> Buffer<'a> {
    /// Bytes of a region.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are memory of `device`, valid and not written to for `'a`.
    #[inline]
    pub(super) unsafe fn new(ptr: NonNull<u8>, len: usize, device: DeviceRef<'a>) -> Buffer<'a> {
        Buffer { ptr, len, device, borrowed: PhantomData }
    }

    /// Size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that the bytes are on; `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'a> {
        self.device
    }

    /// Address of the first byte, in the device's address space.
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The first byte.
    pub(super) fn first(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The bytes, where they are on the host.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device.
    #[inline]
    pub fn as_host(&self) -> Result<&'a [u8]> {
        match self.device {
            // SAFETY: host memory, valid and not written to for 'a by the promise of `new`.
            None => Ok(unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }),
            Some(device) => Err(not_on_host(&**device)),
        }
    }

    /// Some of the bytes.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    pub fn slice(&self, range: Range<usize>) -> Buffer<'a> {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the buffer.
        let ptr = unsafe { self.ptr.add(range.start) };
        Buffer { ptr, len: range.len(), ..*self }
    }

    /// All bytes, so many at a time; the last part may be shorter.
    ///
    /// # Panics
    /// For no bytes at a time.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Buffer<'a>> {
        (0..self.len).step_by(len).map(move |at| self.slice(at..self.len.min(at + len)))
    }

    /// Copies all bytes to the host.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_to(&self, host: &mut [u8]) -> Result<()> {
        assert_eq!(host.len(), self.len);
        match self.device {
            None => host.copy_from_slice(self.as_host()?),
            // SAFETY: memory of this device, by the promise of `new`; a shared borrow keeps writers away.
            Some(device) => unsafe { device.copy_to_host(self.ptr, host)? },
        }
        Ok(())
    }

    /// A copy of all bytes on the host.
    ///
    /// # Errors
    /// Whatever the device reports.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut host = vec![0; self.len];
        self.copy_to(&mut host).map(|()| host)
    }
}

/// Bytes to write, on the host or on a device.
pub struct BufferMut<'a> {
    /// As in [`Buffer`], and exclusive.
    bytes: Buffer<'a>,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> From<&'a mut [u8]> for BufferMut<'a> {
    #[inline]
    fn from(host: &'a mut [u8]) -> BufferMut<'a> {
        let len = host.len();
        // SAFETY: the exclusive borrow of host memory lasts for 'a.
        unsafe { BufferMut::new(NonNull::from(host).cast(), len, None) }
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for BufferMut<'a> {
    #[inline]
    fn from(host: &'a mut [u8; N]) -> BufferMut<'a> {
        BufferMut::from(host.as_mut_slice())
    }
}

impl<'a> BufferMut<'a> {
    /// Bytes of a region, to write.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are memory of `device`, valid for writing, and reached through nothing else for `'a`.
    #[inline]
    pub(super) unsafe fn new(ptr: NonNull<u8>, len: usize, device: DeviceRef<'a>) -> BufferMut<'a> {
        // SAFETY: the caller promises more than a shared borrow needs.
        BufferMut { bytes: unsafe { Buffer::new(ptr, len, device) }, borrowed: PhantomData }
    }

    /// Size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes.len
    }

    /// True when there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The device that the bytes are on; `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'a> {
        self.bytes.device
    }

    /// The same bytes, to read.
    #[inline]
    pub fn as_buffer(&self) -> Buffer<'_> {
        Buffer { ptr: self.bytes.ptr, len: self.bytes.len, device: self.bytes.device, borrowed: PhantomData }
    }

    /// The same bytes for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        // SAFETY: `&mut self` is the only access for as long as the result lives.
        unsafe { BufferMut::new(self.bytes.ptr, self.bytes.len, self.bytes.device) }
    }

    /// So many bytes for steps of the operation that runs, of which nothing is known: of the device's own, or on the host `memory`.
    ///
    /// # Errors
    /// As [`Device::room`].
    pub fn room(place: DeviceRef<'a>, memory: &'a mut Vec<u8>, len: usize) -> Result<BufferMut<'a>> {
        match place {
            Some(device) if len > 0 => {
                let first = device.room(len)?;
                // SAFETY: memory of the device, which is the caller's until the next call: an operation asks once, and those of a lane run
                // one after another.
                Ok(unsafe { BufferMut::new(first, len, place) })
            }
            _ => {
                memory.resize(len, 0);
                // SAFETY: of no bytes, or on the host.
                Ok(unsafe { BufferMut::new(NonNull::from(memory.as_mut_slice()).cast(), len, place) })
            }
        }
    }

    /// All bytes, so many at a time, as [`Buffer::chunks`].
    pub fn chunks(self, len: usize) -> impl Iterator<Item = BufferMut<'a>> {
        self.bytes.chunks(len).map(|bytes| BufferMut { bytes, borrowed: PhantomData })
    }

    /// Some of the bytes, for a shorter time.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    pub fn part(&mut self, range: Range<usize>) -> BufferMut<'_> {
        BufferMut { bytes: self.bytes.slice(range), borrowed: PhantomData }
    }

    /// The bytes before `mid` and those from it on.
    ///
    /// # Panics
    /// When `mid` is beyond the buffer.
    pub fn split_at(self, mid: usize) -> (BufferMut<'a>, BufferMut<'a>) {
        let (head, tail) = (self.bytes.slice(0..mid), self.bytes.slice(mid..self.bytes.len));
        let part = |bytes| BufferMut { bytes, borrowed: PhantomData };
        (part(head), part(tail))
    }

    /// Copies `from`, of one place with this buffer or not, over all bytes.
    ///
    /// # Errors
    /// Whatever a device reports.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_from_buffer(&mut self, from: Buffer<'_>) -> Result<()> {
        match from.device {
            None => self.copy_from(from.as_host()?),
            Some(_) => self.copy_from(&from.to_vec()?),
        }
    }

    /// Copies `from`, of the same place and as long, over all bytes, as a step of the operation that runs.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Panics
    /// When the lengths or the places differ.
    pub fn copy_in_place(&mut self, from: Buffer<'_>) -> Result<()> {
        assert!(from.len == self.len() && same_place(from.device, self.device()));
        match self.bytes.device {
            Some(device) if !from.is_empty() => {
                // SAFETY: memory of this device, by the promise of `new`; the exclusive borrow of one keeps the other apart from it.
                unsafe { device.copy_in_operation(from.ptr, self.bytes.ptr, from.len) }
            }
            _ => self.copy_from_buffer(from),
        }
    }

    /// The bytes, where they are on the host.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device.
    #[inline]
    pub fn into_host(self) -> Result<&'a mut [u8]> {
        match self.bytes.device {
            // SAFETY: host memory, valid and reached through nothing else for 'a by the promise of `new`.
            None => Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.ptr.as_ptr(), self.bytes.len) }),
            Some(device) => Err(not_on_host(&**device)),
        }
    }

    /// Copies `host` over all bytes.
    ///
    /// # Errors
    /// Whatever the device reports.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_from(&mut self, host: &[u8]) -> Result<()> {
        assert_eq!(host.len(), self.len());
        match self.bytes.device {
            None => self.reborrow().into_host()?.copy_from_slice(host),
            // SAFETY: memory of this device, by the promise of `new`; `&mut self` is the only access to it.
            Some(device) => unsafe { device.copy_from_host(host, self.bytes.ptr)? },
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_bytes_pass_through_buffers_unchanged() {
        let mut bytes = [1u8, 2, 3, 4];
        let buffer = Buffer::from(&bytes[..]);
        assert_eq!(
            (buffer.as_host().unwrap(), buffer.slice(1..3).as_host().unwrap()),
            (&[1, 2, 3, 4][..], &[2, 3][..])
        );
        let mut copy = [0; 4];
        buffer.copy_to(&mut copy).unwrap();
        let mut buffer = BufferMut::from(&mut bytes[..]);
        buffer.copy_from(&[5, 6, 7, 8]).unwrap();
        assert_eq!((copy, buffer.into_host().unwrap()), ([1, 2, 3, 4], &mut [5, 6, 7, 8][..]));
    }

    #[test]
    fn the_parts_of_a_buffer_cover_it() {
        let mut bytes = [1u8, 2, 3, 4];
        let (mut head, tail) = BufferMut::from(&mut bytes).split_at(1);
        head.copy_from_buffer(tail.as_buffer().slice(2..3)).unwrap();
        assert_eq!((head.len(), tail.into_host().unwrap()), (1, &mut [2, 3, 4][..]));
        assert_eq!(bytes, [4, 2, 3, 4]);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn a_slice_beyond_the_buffer_panics() {
        let _ = Buffer::from(&[0u8; 4][..]).slice(2..5);
    }
}
