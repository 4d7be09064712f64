//! Devices, and buffers on the host or on a device that the host can access only through copy functions.
//!
//! This crate names no device: [`Device`] is the interface. Read the toy device of the contract tests first. It is
//! trivial, and the host cannot read its memory.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A device whose memory the host cannot address. A [`super::Region`] on the host has no device.
///
/// The methods without a default suffice for verbs. The other methods let operations on a bucket run on the device. All
/// tensors of a bucket share one device value, which lives as long as they are registered. A "stream" is a number that
/// the device uses to identify a queue of work. `None` is the device's default stream.
///
/// Every method may return an error of the device. Both copies return once the bytes are in place. They run on threads
/// that call a verb and on communication threads. The trait requires `Any` so that a collective in another crate can
/// find its own device behind the reference.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// Returns the name for errors and reports, for example "toy:0".
    fn name(&self) -> &str;

    /// Returns the kind of device, which is never 0 (the host). Ranks compare it, as part of the fingerprint.
    fn kind(&self) -> u8;

    /// Copies `into.len()` bytes from device memory to the host.
    ///
    /// # Safety
    /// The bytes at `from` must be memory of this device, valid for reading, and not written during the copy.
    unsafe fn copy_to_host(&self, from: NonNull<u8>, into: &mut [u8]) -> Result<()>;

    /// Copies `from` to device memory.
    ///
    /// # Safety
    /// The `from.len()` bytes at `to` must be memory of this device, valid for writing, and not used by anything else
    /// during the copy.
    unsafe fn copy_from_host(&self, from: &[u8], to: NonNull<u8>) -> Result<()>;

    /// Creates the device state for operations on a bucket. Runs on the communication thread at registration.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Makes the next operations on the bucket wait for the work that is queued on `stream` now.
    ///
    /// Runs on the thread that marks a tensor as ready, which must not wait for the device. A failure has no effect.
    ///
    /// # Errors
    /// `NotImplemented` if the device cannot follow this stream, or the errors of the device.
    fn mark(&self, stream: Option<usize>) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Makes work that is queued on `stream` from now on wait for the marked work and for the operations on the bucket.
    /// Must not wait for the device. Returns the errors of [`Device::mark`].
    fn order(&self, stream: Option<usize>) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// True if the device has finished the marked work, so that a copy would not wait. Does not wait itself.
    fn is_ready(&self) -> Result<bool> {
        Ok(true)
    }

    /// Inserts a time stamp after the device's work on the bucket so far and before the next operation. Runs on the
    /// communication thread. Returns `None` if the device's calls return only when their work is done.
    fn stamp(&self) -> Result<Option<Box<dyn Stamp>>> {
        Ok(None)
    }

    /// Ends one communication of the bucket. Runs on the communication thread after it has issued all operations.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Releases what [`Device::prepare`] created. Runs when the communication thread ends, and may wait for the device.
    fn end(&self) {}

    /// Copies buffers one after another into the device's own memory. Returns the address, which the caller may use
    /// until the next `gather`, or `None` without copying if the device has no such memory.
    ///
    /// # Safety
    /// Each entry must be this number of bytes of this device's memory, valid for reading, and not written until the
    /// next operation is done.
    unsafe fn gather(&self, from: &[(NonNull<u8>, usize)]) -> Result<Option<NonNull<u8>>> {
        let _ = from;
        Ok(None)
    }

    /// Copies the bytes that the last `gather` put together, after the operations on them, back into separate buffers.
    ///
    /// # Safety
    /// Each entry must be this number of bytes of this device's memory, valid for writing, and not used by anything
    /// else until the copies are done. Together they must be as long as the gathered bytes.
    unsafe fn scatter(&self, to: &[(NonNull<u8>, usize)]) -> Result<()> {
        let _ = to;
        Ok(())
    }

    /// Returns `len` uninitialized bytes of the device's own memory for steps of the running operation. The caller may
    /// use them until the next call. `gather` does not use them.
    ///
    /// # Errors
    /// `NotImplemented` if the device has no such memory, or the errors of the device.
    fn room(&self, len: usize) -> Result<NonNull<u8>> {
        Err(Error::NotImplemented(format!("{} has no memory for the {len} bytes that an operation needs", self.name())))
    }

    /// Copies `len` bytes within the device as a step of the running operation. Runs on the communication thread.
    ///
    /// # Safety
    /// Both must be valid memory of this device and must not overlap. Nothing else may use them until the next
    /// operation is done.
    unsafe fn copy_in_operation(&self, from: NonNull<u8>, to: NonNull<u8>, len: usize) -> Result<()> {
        let mut host = vec![0; len];
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_to_host(from, &mut host)?;
            self.copy_from_host(&host, to)
        }
    }

    /// Copies `len` bytes within the device as work of `stream`, after the work that [`Device::order`] names.
    ///
    /// # Errors
    /// The errors of [`Device::mark`].
    ///
    /// # Safety
    /// Both must be valid memory of this device and must not overlap. Nothing else may use them until the stream has
    /// done the copy.
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

/// A time stamp in a device's work, made by [`Device::stamp`].
pub trait Stamp: Any + Send {
    /// Returns the seconds from this stamp to a later one of the same device. Waits until the device has reached both.
    ///
    /// # Errors
    /// Returns the errors of the device, or the first cause of the group's failure.
    fn seconds_to(&self, later: &dyn Stamp) -> Result<f64>;
}

/// A device, or `None` for the host.
pub type DeviceRef<'a> = Option<&'a Arc<dyn Device>>;

/// Returns the kind that a fingerprint carries: 0 for the host.
#[inline]
pub fn kind_of(place: DeviceRef<'_>) -> u8 {
    place.map_or(0, |device| device.kind())
}

/// True if both are on the host, or both on the same device.
#[inline]
pub fn same_place(one: DeviceRef<'_>, other: DeviceRef<'_>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

/// Returns the name of a device or of the host for error texts.
pub fn name_of(place: DeviceRef<'_>) -> &str {
    place.map_or("the host", |device| device.name())
}

fn not_on_host(device: &dyn Device) -> Error {
    Error::UnsupportedType(format!("host memory is needed here, but the tensor is on {}", device.name()))
}

/// Bytes on the host or on a device, borrowed for reading.
#[derive(Clone, Copy)]
pub struct Buffer<'a> {
    /// First byte. Dangling if `len` is 0.
    ptr: NonNull<u8>,
    len: usize,
    device: DeviceRef<'a>,
    borrowed: PhantomData<&'a [u8]>,
}

// SAFETY: a Buffer is a shared borrow, like `&[u8]`, and devices are `Sync`.
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
    /// Creates a buffer for the bytes of a region.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must be memory of `device`, valid and not written for `'a`.
    #[inline]
    pub(super) unsafe fn new(ptr: NonNull<u8>, len: usize, device: DeviceRef<'a>) -> Buffer<'a> {
        Buffer { ptr, len, device, borrowed: PhantomData }
    }

    /// Returns the size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device that holds the bytes, or `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'a> {
        self.device
    }

    /// Returns the address of the first byte, in the device's address space.
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    pub(super) fn first(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the bytes as a slice.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device, if they are not on the host.
    #[inline]
    pub fn as_host(&self) -> Result<&'a [u8]> {
        match self.device {
            // SAFETY: host memory, valid and not written for 'a by the promise of `new`.
            None => Ok(unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }),
            Some(device) => Err(not_on_host(&**device)),
        }
    }

    /// Returns a part of the bytes. Panics if the range is not within the buffer.
    pub fn slice(&self, range: Range<usize>) -> Buffer<'a> {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the buffer.
        let ptr = unsafe { self.ptr.add(range.start) };
        Buffer { ptr, len: range.len(), ..*self }
    }

    /// Splits the buffer into parts of `len` bytes. The last part may be shorter. Panics if `len` is 0.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Buffer<'a>> {
        (0..self.len).step_by(len).map(move |at| self.slice(at..self.len.min(at + len)))
    }

    /// Copies all bytes to the host. Panics if the lengths differ.
    pub fn copy_to(&self, host: &mut [u8]) -> Result<()> {
        assert_eq!(host.len(), self.len);
        match self.device {
            None => host.copy_from_slice(self.as_host()?),
            // SAFETY: memory of this device, by the promise of `new`. A shared borrow keeps writers away.
            Some(device) => unsafe { device.copy_to_host(self.ptr, host)? },
        }
        Ok(())
    }

    /// Returns a copy of all bytes on the host.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut host = vec![0; self.len];
        self.copy_to(&mut host).map(|()| host)
    }
}

/// Bytes on the host or on a device, borrowed for writing.
pub struct BufferMut<'a> {
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
    /// Creates a buffer for writing the bytes of a region.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` must be memory of `device`, valid for writing, and not accessed in any other way for
    /// `'a`.
    #[inline]
    pub(super) unsafe fn new(ptr: NonNull<u8>, len: usize, device: DeviceRef<'a>) -> BufferMut<'a> {
        // SAFETY: the caller promises more than a shared borrow needs.
        BufferMut { bytes: unsafe { Buffer::new(ptr, len, device) }, borrowed: PhantomData }
    }

    /// Returns the size in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes.len
    }

    /// True if there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the device that holds the bytes, or `None` for the host.
    #[inline]
    pub fn device(&self) -> DeviceRef<'a> {
        self.bytes.device
    }

    /// Returns the same bytes for reading.
    #[inline]
    pub fn as_buffer(&self) -> Buffer<'_> {
        Buffer { ptr: self.bytes.ptr, len: self.bytes.len, device: self.bytes.device, borrowed: PhantomData }
    }

    /// Borrows the same bytes for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        // SAFETY: `&mut self` is the only access for as long as the result lives.
        unsafe { BufferMut::new(self.bytes.ptr, self.bytes.len, self.bytes.device) }
    }

    /// Returns `len` uninitialized bytes for the running operation: the device's memory, or `memory` on the host.
    /// Returns the errors of [`Device::room`].
    pub fn room(place: DeviceRef<'a>, memory: &'a mut Vec<u8>, len: usize) -> Result<BufferMut<'a>> {
        match place {
            Some(device) if len > 0 => {
                let first = device.room(len)?;
                // SAFETY: memory of the device that is the caller's until the next call. An operation asks only once,
                // and the operations of a lane run one after another.
                Ok(unsafe { BufferMut::new(first, len, place) })
            }
            _ => {
                memory.resize(len, 0);
                // SAFETY: no bytes, or bytes on the host.
                Ok(unsafe { BufferMut::new(NonNull::from(memory.as_mut_slice()).cast(), len, place) })
            }
        }
    }

    /// Splits the buffer into parts, as [`Buffer::chunks`] does.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = BufferMut<'a>> {
        self.bytes.chunks(len).map(|bytes| BufferMut { bytes, borrowed: PhantomData })
    }

    /// Borrows a part of the bytes. Panics if the range is not within the buffer.
    pub fn part(&mut self, range: Range<usize>) -> BufferMut<'_> {
        BufferMut { bytes: self.bytes.slice(range), borrowed: PhantomData }
    }

    /// Splits the buffer at byte `mid`. Panics if `mid` is beyond the end of the buffer.
    pub fn split_at(self, mid: usize) -> (BufferMut<'a>, BufferMut<'a>) {
        let (head, tail) = (self.bytes.slice(0..mid), self.bytes.slice(mid..self.bytes.len));
        let part = |bytes| BufferMut { bytes, borrowed: PhantomData };
        (part(head), part(tail))
    }

    /// Overwrites all bytes with `from`, which may be on another device. Panics if the lengths differ.
    pub fn copy_from_buffer(&mut self, from: Buffer<'_>) -> Result<()> {
        match from.device {
            None => self.copy_from(from.as_host()?),
            Some(_) => self.copy_from(&from.to_vec()?),
        }
    }

    /// Overwrites all bytes with `from`, which is on the same device, as a step of the running operation. Panics if the
    /// lengths or the devices differ.
    pub fn copy_in_place(&mut self, from: Buffer<'_>) -> Result<()> {
        assert!(from.len == self.len() && same_place(from.device, self.device()));
        match self.bytes.device {
            Some(device) if !from.is_empty() => {
                // SAFETY: memory of this device, by the promise of `new`. One borrow is exclusive, so the two do not
                // overlap.
                unsafe { device.copy_in_operation(from.ptr, self.bytes.ptr, from.len) }
            }
            _ => self.copy_from_buffer(from),
        }
    }

    /// Returns the bytes as a slice.
    ///
    /// # Errors
    /// `UnsupportedType`, naming the device, if they are not on the host.
    #[inline]
    pub fn into_host(self) -> Result<&'a mut [u8]> {
        match self.bytes.device {
            // SAFETY: host memory, valid and not accessed in any other way for 'a by the promise of `new`.
            None => Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.ptr.as_ptr(), self.bytes.len) }),
            Some(device) => Err(not_on_host(&**device)),
        }
    }

    /// Overwrites all bytes with `host`. Panics if the lengths differ.
    pub fn copy_from(&mut self, host: &[u8]) -> Result<()> {
        assert_eq!(host.len(), self.len());
        match self.bytes.device {
            None => self.reborrow().into_host()?.copy_from_slice(host),
            // SAFETY: memory of this device, by the promise of `new`. `&mut self` is the only access to it.
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
