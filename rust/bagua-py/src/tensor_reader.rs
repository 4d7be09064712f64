//! Where a tensor or an array lies, without making an object of it.
//!
//! Asking a torch tensor for its address, count, type, device, layout and strides through attributes costs 0.7 us, making a capsule 2 us,
//! and a NumPy array's `ctypes.data` 1.1 us. Here a tensor is asked by the C function that its class offers for that (DLPack's exchange
//! table, torch 2.10 and later), an array by its array struct. Whatever is not plain (strided and contiguous in this host's memory, of a type
//! that can travel, of exactly the class) is not answered for: the caller then asks by attributes, and raises what there is to raise.
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

/// `DLTensor`.
#[repr(C)]
struct Lying {
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

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    lend: *const c_void,
    import: *const c_void,
    describe: Option<Describe>,
    stream: *const c_void,
}

/// Fills in where the object lies; -1 and a Python exception where it cannot.
type Describe = unsafe extern "C" fn(*mut c_void, *mut Lying) -> c_int;

const TABLE: &CStr = c"dlpack_exchange_api";

/// The major version whose structs stand above.
const MAJOR: u32 = 1;

/// `DLDeviceType` of ordinary memory.
const ON_HOST: c_int = 1;

/// Address, elements, code of the type, dimensions (None: one), and the object itself.
type Found<'py> = (usize, usize, u8, Option<Bound<'py, PyTuple>>, Bound<'py, PyAny>);

/// A plain tensor: its memory, and what was made of its dimensions.
pub struct Plain<T> {
    pub address: usize,
    pub count: usize,
    pub dtype: DType,
    pub shape: T,
}

/// Looks at the tensors of some classes that share one exchange table; without classes, at none.
///
/// `lazy_flags` is called with a tensor that is plain otherwise, and gives what torch has put off in it: something empty when it is plain.
/// `changed` is called with a tuple of one tensor when a verb has written to it. Raises TypeError for classes without such a table.
#[pyclass(frozen, module = "bagua._bagua")]
pub struct TensorReader {
    /// Exactly these; a subclass may mean something else by its memory.
    classes: Vec<Py<PyType>>,
    /// Of their table; `None` without classes.
    describe: Option<Describe>,
    lazy_flags: Py<PyAny>,
    changed: Py<PyAny>,
}

impl TensorReader {
    /// Where a tensor lies, and what `of` makes of its dimensions; `None` when it is not plain.
    pub fn read<T>(&self, x: &Bound<'_, PyAny>, of: impl FnOnce(&[i64]) -> Option<T>) -> Option<Plain<T>> {
        let py = x.py();
        let class = x.get_type_ptr();
        if !self.classes.iter().any(|known| known.as_ptr().cast() == class) {
            return None;
        }
        let mut lying = Lying {
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
        // SAFETY: `x` is of a class that the table belongs to, this thread is attached, and `lying` has room for the answer.
        if unsafe { (self.describe?)(x.as_ptr().cast(), &raw mut lying) } != 0 {
            drop(PyErr::take(py));
            return None;
        }
        let dtype = match (lying.code, lying.bits, lying.lanes) {
            (2, 16, 1) => DType::F16,
            (4, 16, 1) => DType::BF16,
            (2, 32, 1) => DType::F32,
            (2, 64, 1) => DType::F64,
            (1, 8, 1) => DType::U8,
            (0, 8, 1) => DType::I8,
            (0, 32, 1) => DType::I32,
            (0, 64, 1) => DType::I64,
            (6, 8, 1) => DType::Bool,
            (5, 64, 1) => DType::C64,
            (5, 128, 1) => DType::C128,
            _ => return None,
        };
        if lying.device_type != ON_HOST {
            return None;
        }
        // SAFETY: until this thread releases the GIL, both are as long as the tensor has dimensions (or null).
        let (dims, strides) = unsafe { (dims(lying.shape, lying.ndim)?, dims(lying.strides, lying.ndim)) };
        if strides.is_some_and(|strides| !contiguous(dims, strides)) {
            return None;
        }
        let count = dims.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).product();
        let address = lying.data.addr() + usize::try_from(lying.byte_offset).ok()?;
        let shape = of(dims)?;
        let lazy_flags = self.lazy_flags.bind(py).call1((x,)).and_then(|answer| answer.is_truthy());
        matches!(lazy_flags, Ok(false)).then_some(Plain { address, count, dtype, shape })
    }

    /// Says that a tensor's values are others now.
    pub fn changed(&self, x: &Bound<'_, PyAny>) -> PyResult<()> {
        self.changed.bind(x.py()).call1(((x,),)).map(drop)
    }
}

#[pymethods]
impl TensorReader {
    #[new]
    fn new(classes: Vec<Bound<'_, PyType>>, lazy_flags: Py<PyAny>, changed: Py<PyAny>) -> PyResult<TensorReader> {
        let mut found = None;
        for class in &classes {
            let table = class.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
            // SAFETY: a capsule, and a name that lives for ever; a wrong name gives null and an exception.
            let table =
                unsafe { ffi::PyCapsule_GetPointer(table.as_ptr(), TABLE.as_ptr()) }.cast::<Table>().cast_const();
            if table.is_null() {
                return Err(PyErr::fetch(class.py()));
            }
            if *found.get_or_insert(table) != table {
                return Err(PyTypeError::new_err("the classes do not share one exchange table"));
            }
        }
        // SAFETY: a capsule of this name points to a table of the process's lifetime; the version comes first in every version of it.
        let describe =
            found.and_then(|table| unsafe { if (*table).major == MAJOR { (*table).describe } else { None } });
        if found.is_some() && describe.is_none() {
            return Err(PyTypeError::new_err("the classes cannot describe what they lend"));
        }
        Ok(TensorReader { classes: classes.into_iter().map(Bound::unbind).collect(), describe, lazy_flags, changed })
    }

    /// Address, elements, code of the type, dimensions (None for one dimension) and the tensor itself, of a plain tensor; None for all
    /// others. A negation that torch has put off is not plain.
    fn at<'py>(&self, x: Bound<'py, PyAny>) -> Option<Found<'py>> {
        let Plain { address, count, dtype, shape } = self.read(&x, |dims| several(x.py(), dims))?;
        Some((address, count, dtype as u8, shape, x))
    }
}

/// `PyArrayInterface`.
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

/// Contiguous in C order, aligned, in this machine's byte order.
const PLAIN: c_int = 0x1 | 0x100 | 0x200;
const WRITEABLE: c_int = 0x400;

/// Address, elements, code of the type, dimensions (None: one), and whether it may be written.
type FoundArray<'py> = (usize, usize, u8, Option<Bound<'py, PyTuple>>, bool);

/// Address, elements, code of the type, dimensions (None for one dimension), and whether it may be written, of a contiguous NumPy array;
/// None for everything else.
#[pyfunction]
pub fn read_array<'py>(x: &Bound<'py, PyAny>) -> Option<FoundArray<'py>> {
    static NDARRAY: pyo3::sync::PyOnceLock<Py<PyType>> = pyo3::sync::PyOnceLock::new();
    let py = x.py();
    let ndarray = NDARRAY.import(py, "numpy", "ndarray").ok()?;
    if ndarray.as_ptr().cast() != x.get_type_ptr() {
        return None;
    }
    let capsule = x.getattr(intern!(py, "__array_struct__")).ok()?.cast_into::<PyCapsule>().ok()?;
    // SAFETY: a capsule; NumPy's has no name. Null, which is looked at next, comes with an exception.
    let array = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), null()) }.cast::<Array>().cast_const();
    if array.is_null() {
        drop(PyErr::take(py));
        return None;
    }
    // SAFETY: what NumPy's own class puts into this capsule is such a struct, and the capsule is alive.
    let array = unsafe { &*array };
    if array.two != 2 || array.flags & PLAIN != PLAIN {
        return None;
    }
    let dtype = match (array.kind, array.itemsize) {
        (b'f', 2) => DType::F16,
        (b'f', 4) => DType::F32,
        (b'f', 8) => DType::F64,
        (b'u', 1) => DType::U8,
        (b'i', 1) => DType::I8,
        (b'i', 4) => DType::I32,
        (b'i', 8) => DType::I64,
        (b'b', 1) => DType::Bool,
        (b'c', 8) => DType::C64,
        (b'c', 16) => DType::C128,
        _ => return None,
    };
    // SAFETY: the struct's shape has that many dimensions.
    let shape = unsafe { dims(array.shape, array.nd) }?;
    let count = shape.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).product();
    let writeable = array.flags & WRITEABLE != 0;
    Some((array.data.addr(), count, dtype as u8, several(py, shape)?, writeable))
}

/// `ndim` numbers at `first`; None where they are missing.
///
/// # Safety
/// `first` is null or points to `ndim` numbers that live for `'a`.
unsafe fn dims<'a, T>(first: *const T, ndim: c_int) -> Option<&'a [T]> {
    match usize::try_from(ndim).ok()? {
        0 => Some(&[]),
        _ if first.is_null() => None,
        // SAFETY: the caller's promise.
        ndim => Some(unsafe { std::slice::from_raw_parts(first, ndim) }),
    }
}

/// As torch means it: dimensions of one element do not count, and nothing is contiguous.
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

/// The dimensions as fingerprints have them.
#[expect(clippy::unnecessary_wraps, reason = "for `TensorReader::see`")]
pub fn shape(dims: &[i64]) -> Option<Shape> {
    let mut first = [0; 4];
    for (slot, dim) in first.iter_mut().zip(dims) {
        *slot = u32::try_from(*dim).unwrap_or(u32::MAX);
    }
    Some(Shape { ndim: u8::try_from(dims.len()).unwrap_or(u8::MAX), dims: first })
}

/// The dimensions, unless there is one. The outer None: Python could not make the tuple.
#[expect(clippy::option_option, reason = "a failure, and Python's None")]
fn several<'py, T: Copy + IntoPyObject<'py>>(py: Python<'py>, shape: &[T]) -> Option<Option<Bound<'py, PyTuple>>> {
    if shape.len() == 1 { Some(None) } else { PyTuple::new(py, shape.iter().copied()).ok().map(Some) }
}
