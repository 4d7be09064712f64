//! Address, length and type of tensors and arrays, without creating Python objects.
//!
//! Reading address, count, type, device, layout and strides of a torch tensor through attributes takes 0.7 us, creating
//! a DLPack capsule 2 us, and `ctypes.data` of a NumPy array 1.1 us. This module reads a tensor through the C function
//! of its class (DLPack's exchange table, torch 2.10 and later), and an array through its array struct. It reads only
//! plain tensors: contiguous, in host memory, of a supported type, and exactly of a registered class. For all others,
//! the caller reads the attributes and raises the error if there is one.
//!
//! <https://dmlc.github.io/dlpack/latest/c_api.html>, <https://numpy.org/doc/stable/reference/arrays.interface.html>

#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use bagua_core::types::{DType, Shape};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple, PyType};
use pyo3::{ffi, intern};

/// DLPack's `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: c_int,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    describe: Option<Describe>,
    stream: *const c_void,
}

/// Writes the `DLTensor` of an object; returns -1 and sets a Python exception on failure.
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

const CAPSULE_NAME: &CStr = c"dlpack_exchange_api";

/// The major version of the structs above.
const MAJOR: u32 = 1;

/// `DLDeviceType` of host memory.
const HOST_DEVICE: c_int = 1;

/// Declares the element types, each with DLPack's code and bits and NumPy's kind and bytes.
macro_rules! element_types {
    ($($DType:ident: $dlpack:literal, $bits:literal, $numpy:literal;)*) => {
        fn of_dlpack(code: u8, bits: u8) -> Option<DType> {
            match (code, bits) {
                $(($dlpack, $bits) => Some(DType::$DType),)*
                _ => None,
            }
        }

        fn of_numpy(kind: u8, bytes: c_int) -> Option<DType> {
            match (kind, bytes.checked_mul(8)?) {
                $(($numpy, $bits) => Some(DType::$DType),)*
                _ => None,
            }
        }
    };
}

element_types! {
    F16: 2, 16, b'f';
    // NumPy does not have this type. No kind of NumPy is 0.
    BF16: 4, 16, 0;
    F32: 2, 32, b'f';
    F64: 2, 64, b'f';
    U8: 1, 8, b'u';
    I8: 0, 8, b'i';
    U16: 1, 16, b'u';
    I16: 0, 16, b'i';
    U32: 1, 32, b'u';
    I32: 0, 32, b'i';
    U64: 1, 64, b'u';
    I64: 0, 64, b'i';
    Bool: 6, 8, b'b';
    C64: 5, 64, b'c';
    C128: 5, 128, b'c';
}

/// Address, number of elements, code of the type, and dimensions (None for one dimension).
type Found<'py> = (usize, usize, u8, Option<Bound<'py, PyTuple>>);

/// The memory and the type of a plain tensor.
pub struct Plain<T> {
    pub address: usize,
    pub count: usize,
    pub dtype: DType,
    /// The dimensions, as converted by the caller of [`TensorReader::read`].
    pub shape: T,
}

/// A reader of tensors of some classes that share one exchange table. Without classes it reads none.
///
/// `lazy_flags` is called with a tensor that is otherwise plain, and returns a false value unless torch has a
/// conjugation or negation of it that is not applied yet. `changed` is called with a tuple of one tensor after a verb
/// has written to it. With `compares_shapes` false, a verb compares only the sizes of the ranks' tensors. Raises
/// TypeError for classes without an exchange table.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct TensorReader {
    /// Classes whose tensors are read. A subclass is not read, because it may interpret its memory differently.
    classes: Vec<Py<PyType>>,
    /// The function of the classes' table. `None` without classes.
    describe: Option<Describe>,
    lazy_flags: Py<PyAny>,
    changed: Option<Py<PyAny>>,
    pub compares_shapes: bool,
}

impl TensorReader {
    /// Reads a tensor and converts its dimensions with `shape_of`. Returns `None` if the tensor is not plain.
    pub fn read<T>(&self, x: &Bound<'_, PyAny>, shape_of: impl FnOnce(&[i64]) -> Option<T>) -> Option<Plain<T>> {
        let py = x.py();
        let class = x.get_type_ptr();
        if !self.classes.iter().any(|known| known.as_ptr().cast() == class) {
            return None;
        }
        let mut tensor = DlTensor {
            data: null_mut(),
            device_type: 0,
            device_id: 0,
            ndim: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: null(),
            strides: null(),
            byte_offset: 0,
        };
        // SAFETY: the table belongs to the class of `x`, this thread is attached, and `tensor` has room for the result.
        if unsafe { (self.describe?)(x.as_ptr().cast(), &raw mut tensor) } != 0 {
            drop(PyErr::take(py));
            return None;
        }
        let dtype = of_dlpack(tensor.code, tensor.bits).filter(|_| tensor.lanes == 1)?;
        if tensor.device_type != HOST_DEVICE {
            return None;
        }
        // SAFETY: until this thread releases the GIL, both pointers are null or have one element for each dimension of
        // the tensor.
        let (dims, strides) = unsafe { (dims(tensor.shape, tensor.ndim)?, dims(tensor.strides, tensor.ndim)) };
        if strides.is_some_and(|strides| !contiguous(dims, strides)) {
            return None;
        }
        let count = dims.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).product();
        let address = tensor.data.addr() + usize::try_from(tensor.byte_offset).ok()?;
        // A tensor can have elements but no memory, such as torch's zero tensors.
        if address == 0 && count > 0 {
            return None;
        }
        let shape = shape_of(dims)?;
        let lazy_flags = self.lazy_flags.bind(py).call1((x,)).and_then(|answer| answer.is_truthy());
        matches!(lazy_flags, Ok(false)).then_some(Plain { address, count, dtype, shape })
    }

    /// Reports that the values of a tensor have changed.
    pub fn changed(&self, x: &Bound<'_, PyAny>) -> PyResult<()> {
        self.changed.as_ref().map_or(Ok(()), |changed| changed.bind(x.py()).call1(((x,),)).map(drop))
    }
}

#[pymethods]
impl TensorReader {
    #[new]
    #[pyo3(signature = (classes, lazy_flags, changed=None, *, compares_shapes=true))]
    fn new(
        classes: Vec<Bound<'_, PyType>>,
        lazy_flags: Py<PyAny>,
        changed: Option<Py<PyAny>>,
        compares_shapes: bool,
    ) -> PyResult<TensorReader> {
        let mut found = None;
        for class in &classes {
            let table = class.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
            // SAFETY: a capsule and a static name; for a wrong name the function returns null and sets an exception.
            let table = unsafe { ffi::PyCapsule_GetPointer(table.as_ptr(), CAPSULE_NAME.as_ptr()) }
                .cast::<ExchangeApi>()
                .cast_const();
            if table.is_null() {
                return Err(PyErr::fetch(class.py()));
            }
            if *found.get_or_insert(table) != table {
                return Err(PyTypeError::new_err("the classes do not share one exchange table"));
            }
        }
        // SAFETY: a capsule of this name points to a static table, whose first fields are the version in every version.
        let describe =
            found.and_then(|table| unsafe { if (*table).major == MAJOR { (*table).describe } else { None } });
        if found.is_some() && describe.is_none() {
            return Err(PyTypeError::new_err("the exchange table of the classes cannot describe tensors"));
        }
        let classes = classes.into_iter().map(Bound::unbind).collect();
        Ok(TensorReader { classes, describe, lazy_flags, changed, compares_shapes })
    }

    /// Returns address, number of elements, code of the type and dimensions (None for one dimension) of a plain tensor.
    /// Returns None for all others, including a tensor with a lazy negation.
    fn at<'py>(&self, x: &Bound<'py, PyAny>) -> Option<Found<'py>> {
        let Plain { address, count, dtype, shape } = self.read(x, |dims| dims_tuple(x.py(), dims))?;
        Some((address, count, dtype as u8, shape))
    }
}

/// NumPy's `PyArrayInterface`.
#[repr(C)]
struct Array {
    two: c_int,
    nd: c_int,
    kind: u8,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
    description: *mut c_void,
}

/// Flags of an array that is C-contiguous, aligned and in native byte order.
const PLAIN: c_int = 0x1 | 0x100 | 0x200;
const WRITEABLE: c_int = 0x400;

/// Address, number of elements, code of the type, dimensions (None for one dimension), and true if writeable.
type FoundArray<'py> = (usize, usize, u8, Option<Bound<'py, PyTuple>>, bool);

/// Returns address, number of elements, code of the type, dimensions (None for one dimension), and true if the array is
/// writeable, of a contiguous NumPy array. Returns None for all other objects.
#[pyfunction]
pub fn read_array<'py>(x: &Bound<'py, PyAny>) -> Option<FoundArray<'py>> {
    static NDARRAY: pyo3::sync::PyOnceLock<Py<PyType>> = pyo3::sync::PyOnceLock::new();
    let py = x.py();
    let ndarray = NDARRAY.import(py, "numpy", "ndarray").ok()?;
    if ndarray.as_ptr().cast() != x.get_type_ptr() {
        return None;
    }
    let capsule = x.getattr(intern!(py, "__array_struct__")).ok()?.cast_into::<PyCapsule>().ok()?;
    // SAFETY: a capsule; NumPy's has no name. On failure the function returns null and sets an exception.
    let array = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), null()) }.cast::<Array>().cast_const();
    if array.is_null() {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: NumPy's ndarray puts a struct of this layout into the capsule, and the capsule is alive.
    let array = unsafe { &*array };
    if array.two != 2 || array.flags & PLAIN != PLAIN {
        return None;
    }
    let dtype = of_numpy(array.kind, array.itemsize)?;
    // SAFETY: the shape of the struct has `nd` elements.
    let shape = unsafe { dims(array.shape, array.nd) }?;
    let count = shape.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).product();
    let writeable = array.flags & WRITEABLE != 0;
    Some((array.data.addr(), count, dtype as u8, dims_tuple(py, shape)?, writeable))
}

/// Returns the `ndim` numbers at `first`, or `None` if `first` is null or `ndim` is negative.
///
/// # Safety
/// `first` is null or points to `ndim` numbers that live for `'a`.
unsafe fn dims<'a, T>(first: *const T, ndim: c_int) -> Option<&'a [T]> {
    match usize::try_from(ndim).ok()? {
        0 => Some(&[]),
        _ if first.is_null() => None,
        // SAFETY: the caller guarantees `ndim` numbers.
        ndim => Some(unsafe { std::slice::from_raw_parts(first, ndim) }),
    }
}

/// Returns true if a tensor is contiguous as torch defines it: strides of dimensions of one element are ignored, and an
/// empty tensor is contiguous.
fn contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    for (dim, stride) in shape.iter().zip(strides).rev() {
        match dim {
            0 => return true,
            1 => {}
            _ if *stride != expected => return shape.contains(&0),
            _ => expected *= dim,
        }
    }
    true
}

/// Returns the shape for a fingerprint.
#[expect(clippy::unnecessary_wraps, reason = "the signature that `TensorReader::read` expects")]
pub fn shape(dims: &[i64]) -> Option<Shape> {
    Some(Shape::new(dims))
}

/// Returns the dimensions as a tuple: `Some(None)` for one dimension, `None` if the tuple cannot be created.
#[expect(clippy::option_option, reason = "the outer option is a failure, the inner one is Python's None")]
fn dims_tuple<'py, T: Copy + IntoPyObject<'py>>(py: Python<'py>, shape: &[T]) -> Option<Option<Bound<'py, PyTuple>>> {
    if shape.len() == 1 { Some(None) } else { PyTuple::new(py, shape.iter().copied()).ok().map(Some) }
}
