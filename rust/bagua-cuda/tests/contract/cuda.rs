//! Ranks whose collectives run on memory of a simulated CUDA device.

use std::ffi::{CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bagua_core::collective::{Collective, CollectiveFactory, Incoming, Io, OpContext, Outgoing, Verb};
use bagua_core::error::Result;
use bagua_core::memory::{Device, DeviceRef, Region};
use bagua_core::same_ranks_as;
use bagua_core::types::DType;
use bagua_core::wait::Waited;
use bagua_cuda::{Context, Factory, LaneDevice, Libraries, LibraryPaths, OperationDevice, Requested};

use crate::world::{Ranks, hier, local, shm};

/// The functions of the driver that a test calls itself.
struct Driver {
    alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    free: unsafe extern "C" fn(u64) -> c_int,
    to_device: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int,
    to_host: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int,
    set_context: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// The primary context of device 0.
    primary: usize,
    context: Arc<Context>,
}

/// The simulated driver, built if it can be; `None` and a line on standard error where it cannot.
fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(load).as_ref()
}

#[expect(clippy::missing_transmute_annotations, reason = "the fields have the types")]
fn load() -> Option<Driver> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path: PathBuf = root.join("target/cuda-sim/libcuda.so.1");
    // Tests run in several processes, of which one may build at a time.
    std::fs::create_dir_all(path.parent()?).ok()?;
    let one = std::fs::File::create(path.with_extension("lock")).ok()?;
    one.lock().ok()?;
    let made = Command::new("make").args(["--silent", "cuda-sim"]).current_dir(&root).status();
    drop(one);
    if !path.exists() {
        eprintln!("skipped: the simulated driver is not there, and 'make cuda-sim' does not build it: {made:?}");
        return None;
    }
    let libraries = Box::leak(Box::new(Libraries::new()));
    let places = LibraryPaths { libcuda: Some(path.clone()), ..LibraryPaths::default() };
    let context = libraries.driver(&places).unwrap().context(0).unwrap();
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library is loaded already, and its functions have the driver's signatures.
    unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null());
        let symbol = |name: &std::ffi::CStr| {
            let found = libc::dlsym(handle, name.as_ptr());
            assert!(!found.is_null(), "{name:?}");
            found
        };
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            std::mem::transmute(symbol(c"cuDevicePrimaryCtxRetain"));
        let mut primary = std::ptr::null_mut();
        assert_eq!(retain(&raw mut primary, 0), 0);
        Some(Driver {
            alloc: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemAlloc_v2")),
            free: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemFree_v2")),
            to_device: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemcpyHtoD_v2")),
            to_host: std::mem::transmute::<*mut c_void, _>(symbol(c"cuMemcpyDtoH_v2")),
            set_context: std::mem::transmute::<*mut c_void, _>(symbol(c"cuCtxSetCurrent")),
            primary: primary as usize,
            context,
        })
    }
}

/// Bytes on the device.
struct CudaMemory {
    driver: &'static Driver,
    region: Region,
}

impl CudaMemory {
    /// A copy of these bytes.
    fn of(driver: &'static Driver, place: &Arc<OperationDevice>, bytes: &[u8]) -> CudaMemory {
        let mut address = 0;
        // SAFETY: the context lives for ever; the calls write one address and read these bytes.
        unsafe {
            assert_eq!((driver.set_context)(driver.primary as *mut c_void), 0);
            assert_eq!((driver.alloc)(&raw mut address, bytes.len().max(1)), 0);
            assert_eq!((driver.to_device)(address, bytes.as_ptr().cast(), bytes.len()), 0);
        }
        let device = Arc::clone(place) as Arc<dyn Device>;
        // SAFETY: the memory lives as long as this value, and only the device reaches it.
        let region = unsafe { Region::on(device, address as *mut u8, bytes.len(), DType::U8) }.unwrap();
        CudaMemory { driver, region }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut host = vec![0; self.region.len()];
        // SAFETY: memory of this length on both sides.
        let code =
            unsafe { (self.driver.to_host)(host.as_mut_ptr().cast(), self.region.address() as u64, self.region.len()) };
        assert_eq!(code, 0);
        host
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // SAFETY: the memory of `of`, which no thread uses any more.
        assert_eq!(unsafe { (self.driver.free)(self.region.address() as u64) }, 0);
    }
}

/// Takes host buffers and runs everything on copies of them on the device, so that the contract of host memory applies.
struct OnCuda {
    staged: Box<dyn Collective>,
    driver: &'static Driver,
    lane_device: Arc<LaneDevice>,
}

impl OnCuda {
    fn place(&self) -> Result<Arc<OperationDevice>> {
        let place = OperationDevice::new(&self.lane_device, Requested::Auto, 1, Vec::new())?;
        self.lane_device.prepare()?;
        Ok(Arc::new(place))
    }

    fn done(place: &OperationDevice) -> Result<()> {
        match place.wait_for(Duration::from_secs(60)) {
            Waited::Done(result) => result,
            Waited::Pending => panic!("the device is not done"),
        }
    }
}

impl Collective for OnCuda {
    same_ranks_as!(self => self.staged);

    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        self.staged.reaches(place)
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let place = self.place()?;
        match io {
            Io::InPlace(mut data) => {
                let mut memory = CudaMemory::of(self.driver, &place, data.as_buffer().as_host()?);
                place.start()?;
                self.staged.run(cx, verb, Io::InPlace(memory.region.buffer_mut()))?;
                OnCuda::done(&place)?;
                data.copy_from(&memory.bytes())
            }
            Io::Split { src, mut dst } => {
                let from = CudaMemory::of(self.driver, &place, src.as_host()?);
                let mut to = CudaMemory::of(self.driver, &place, dst.as_buffer().as_host()?);
                place.start()?;
                let io = Io::Split { src: from.region.buffer(), dst: to.region.buffer_mut() };
                self.staged.run(cx, verb, io)?;
                OnCuda::done(&place)?;
                dst.copy_from(&to.bytes())
            }
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let place = self.place()?;
        let memory = |bytes: &[u8]| CudaMemory::of(self.driver, &place, bytes);
        let given: Vec<_> = sends.iter().map(|m| Ok(memory(m.data.as_host()?))).collect::<Result<_>>()?;
        let mut got: Vec<_> = recvs.iter().map(|m| memory(&vec![0; m.data.len()])).collect();
        place.start()?;
        let outgoing: Vec<_> =
            sends.iter().zip(&given).map(|(m, data)| Outgoing { data: data.region.buffer(), ..*m }).collect();
        let mut incoming: Vec<_> = recvs
            .iter()
            .zip(&mut got)
            .map(|(m, data)| Incoming { peer: m.peer, fingerprint: m.fingerprint, data: data.region.buffer_mut() })
            .collect();
        self.staged.exchange(cx, &outgoing, &mut incoming)?;
        drop(incoming);
        OnCuda::done(&place)?;
        recvs.iter_mut().zip(&got).try_for_each(|(message, data)| message.data.copy_from(&data.bytes()))
    }
}

fn on_cuda(ranks: Ranks, size: usize) -> Vec<Box<dyn Collective>> {
    let inner = ranks(size);
    // Without the driver the contract is asked of the host's collectives, which the line above says.
    let Some(driver) = driver() else { return inner };
    let wrap = |inner: Box<dyn Collective>| {
        let staged = Factory.wrap(inner, &[(0..size).collect()]);
        Box::new(OnCuda { staged, driver, lane_device: Arc::new(LaneDevice::new(&driver.context)) })
            as Box<dyn Collective>
    };
    inner.into_iter().map(wrap).collect()
}

/// A device over streams between threads.
pub fn cuda_local(size: usize) -> Vec<Box<dyn Collective>> {
    on_cuda(local, size)
}

/// A device over shared memory.
pub fn cuda_shm(size: usize) -> Vec<Box<dyn Collective>> {
    on_cuda(shm, size)
}

/// A device over hosts.
pub fn cuda_hier(size: usize) -> Vec<Box<dyn Collective>> {
    on_cuda(hier, size)
}
