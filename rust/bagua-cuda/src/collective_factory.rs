//! A lane's collective. It passes host memory to the host's collective, and arrays on devices to the collective that
//! the ranks choose in the first such operation.

use std::sync::Arc;

use bagua_core::codec::Codec;
use bagua_core::collective::{
    Collective, CollectiveFactory, DeviceCodec, Incoming, Io, OpContext, Outgoing, Verb, average_on_host, over_exchange,
};
use bagua_core::error::{Error, Result};
use bagua_core::memory::{Buffer, BufferMut, DeviceRef};
use bagua_core::same_ranks_as;
use bagua_core::types::{DType, Fingerprint};
use nccl_sys::UNIQUE_ID_BYTES;

use crate::average_on_device::Average;
use crate::collective_choice::{self, Candidate, NCCL, RECORD};
use crate::compressed::CodecOnDevice;
use crate::device::{KIND, OperationDevice, Requested, place_of};
use crate::device_lane::{Choice, LaneDevice};
use crate::kernels::MAX_SOURCES;
use crate::nccl::{Communicator, Nccl, serves, unique_id};
use crate::shard_addresses::Parts;
use crate::staged;

/// Number of bytes that ranks send to compare their calls: a whole number of elements of any type.
const CHECK: usize = 16;

/// Wraps the host's collectives in those of this crate.
#[derive(Debug)]
pub struct Factory;

impl CollectiveFactory for Factory {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn device(&self) -> u8 {
        KIND
    }

    fn wrap(&self, inner: Box<dyn Collective>, hosts: &[Vec<usize>]) -> Box<dyn Collective> {
        let hosts = hosts.to_vec();
        let (lane_devices, compared) = (Vec::new(), Compared::default());
        let memory = [Vec::new(), Vec::new()];
        Box::new(OnDevices { inner, hosts, chosen: None, nccl: None, lane_devices, compared, memory })
    }
}

/// A lane's collective for the host and for devices: see the module.
struct OnDevices {
    inner: Box<dyn Collective>,
    hosts: Vec<Vec<usize>>,
    /// The collective that the ranks agreed on in the lane's first operation on a device. `None` before it.
    chosen: Option<Choice>,
    /// The communicator of all ranks, with the choice `nccl`.
    nccl: Option<Communicator>,
    lane_devices: Vec<Arc<LaneDevice>>,
    /// The bucket operations that the ranks have compared.
    compared: Compared,
    /// Host memory that messages of devices pass through: outgoing, incoming.
    memory: [Vec<u8>; 2],
}

/// Registrations of a lane's buckets, numbered in the order in which the buckets are communicated.
#[derive(Default)]
struct Compared {
    highest: u64,
    last: u64,
}

impl Compared {
    /// Returns true if the ranks must compare the operation on bucket `number`: on the first use of a bucket, and at
    /// the start of a step, where the number does not increase.
    fn is_due(&mut self, number: u64) -> bool {
        let is_due = number > self.highest || number <= self.last;
        self.highest = self.highest.max(number);
        self.last = number;
        is_due
    }
}

impl Collective for OnDevices {
    same_ranks_as!(self => self.inner);

    fn reaches(&self, place: DeviceRef<'_>) -> bool {
        place.is_none_or(|device| device.kind() == KIND) || self.inner.reaches(place)
    }

    fn codec_on(
        &mut self,
        place: DeviceRef<'_>,
        codec: &dyn Codec,
        dtype: DType,
    ) -> Result<Option<Box<dyn DeviceCodec>>> {
        match place {
            Some(device) if place_of(place).is_some() => CodecOnDevice::open(device, codec, dtype),
            _ => self.inner.codec_on(place, codec, dtype),
        }
    }

    fn average(&mut self, cx: &OpContext<'_>, inputs: &[Option<Buffer<'_>>], into: BufferMut<'_>) -> Result<()> {
        let Some(place) = place_of(into.device()) else { return self.inner.average(cx, inputs, into) };
        let kernel = match inputs.len() {
            ..=MAX_SOURCES => Average::new(place.lane_device().context(), cx.dtype(), inputs.len()),
            more => Err(Error::Unavailable(format!("{more} inputs are more than a kernel can average"))),
        };
        // If the kernel is unavailable, this rank averages on the host, with the bits of ranks that have the kernel.
        let Some(kernel) = unless_unavailable(kernel)? else { return average_on_host(cx, inputs, into) };
        let to = into.as_buffer();
        let sources: Vec<usize> = inputs.iter().map(|input| input.unwrap_or(to).address()).collect();
        place.on_lane(|lane_device, copier| {
            lane_device.order_after_last(copier.up.handle())?;
            // SAFETY: memory of the operation, which alone writes to the target. Its end on the device is marked below.
            unsafe { kernel.launch(lane_device, copier.up.handle(), &sources, to.address(), to.len()) }?;
            place.mark_end(copier, false)
        })
    }

    fn run(&mut self, cx: &OpContext<'_>, verb: Verb<'_>, io: Io<'_>) -> Result<()> {
        let place = place_of(io.device()?);
        if verb.is_over_exchange() {
            if let Some(place) = place {
                self.agree_on_messages(cx, place)?;
            }
            return over_exchange(self, cx, verb, io);
        }
        let Some(place) = place else { return self.inner.run(cx, verb, io) };
        self.agree(cx, place)?;
        let parts = Parts::new(verb, &io, self.rank(), self.size());
        // The host does the reductions that NCCL lacks.
        match self.nccl.as_ref().filter(|_| serves(verb, cx.dtype())) {
            Some(nccl) => nccl.run(cx, verb, &parts, place),
            None => staged::run(self.inner.as_mut(), cx, verb, &parts, place),
        }
    }

    fn exchange(&mut self, cx: &OpContext<'_>, sends: &[Outgoing<'_>], recvs: &mut [Incoming<'_>]) -> Result<()> {
        let devices = sends.iter().map(|message| message.data.device());
        let Some(place) =
            devices.chain(recvs.iter().map(|message| message.data.device())).find_map(|device| place_of(device))
        else {
            return self.inner.exchange(cx, sends, recvs);
        };
        match &self.nccl {
            Some(nccl) => nccl.run_messages(cx, sends, recvs, place),
            None => staged::exchange(self.inner.as_mut(), cx, sends, recvs, place, &mut self.memory),
        }
    }

    fn end(&mut self) {
        self.inner.end();
        self.end_nccl();
        for lane_device in self.lane_devices.drain(..) {
            lane_device.end();
        }
    }
}

impl OnDevices {
    /// Lets all ranks choose the collective once, over the host's collective. With NCCL, they also compare their calls.
    /// Fails with `Unavailable` on all ranks if requests differ or cannot be served, or with the error of creating the
    /// communicator.
    fn agree(&mut self, cx: &OpContext<'_>, place: &OperationDevice) -> Result<()> {
        let lane_device = place.lane_device();
        if !self.lane_devices.iter().any(|known| Arc::ptr_eq(known, &lane_device)) {
            self.lane_devices.push(Arc::clone(&lane_device));
        }
        let choice = match &self.chosen {
            Some(choice) => choice,
            None => {
                let (candidate, nccl) = candidate(place);
                let mut all = vec![0; self.size() * RECORD];
                self.inner.run(cx, Verb::AllGather, Io::split(&candidate.to_record(), &mut all))?;
                let candidates: Vec<_> = all.chunks(RECORD).map(Candidate::from_record).collect();
                let choice = collective_choice::choose(&candidates, &self.hosts)?;
                if choice.collective == NCCL {
                    self.nccl = Some(connect(self.inner.as_mut(), cx, nccl.as_ref(), place)?);
                    lane_device.unprepare();
                }
                &*self.chosen.insert(choice)
            }
        };
        // The choice holds for the lane, so other devices of the lane take it over.
        lane_device.choice.get_or_init(|| choice.clone());
        if let Some(nccl) = &self.nccl {
            nccl.check_device(place)?;
            compare(self.inner.as_mut(), &mut self.compared, cx, place)?;
        }
        Ok(())
    }

    /// Lets all ranks choose a collective, before a verb that is made of messages. If `staged` was requested there is
    /// nothing to choose, and some ranks may have the tensor on the host.
    fn agree_on_messages(&mut self, cx: &OpContext<'_>, place: &OperationDevice) -> Result<()> {
        if place.requested == Requested::Staged && self.chosen.is_none() {
            return Ok(());
        }
        // With the device in the fingerprint, ranks that have the tensor on the host raise an error instead of waiting.
        let cx = &OpContext { fingerprint: Fingerprint { device: KIND, ..cx.fingerprint }, ..*cx };
        self.agree(cx, place)
    }

    fn end_nccl(&mut self) {
        let Some(nccl) = self.nccl.take() else { return };
        let context = Arc::clone(nccl.context());
        let lane_devices =
            || self.lane_devices.iter().filter(|lane_device| Arc::ptr_eq(lane_device.context(), &context));
        let last = lane_devices().find_map(|lane_device| lane_device.last());
        if !nccl.end(last.as_deref()) {
            lane_devices().for_each(|lane_device| lane_device.forget());
        }
    }
}

impl Drop for OnDevices {
    fn drop(&mut self) {
        self.end_nccl();
    }
}

fn unless_unavailable<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(Error::Unavailable(_)) => Ok(None),
        other => other.map(Some),
    }
}

/// Creates a communicator for the ranks of a host's collective. Rank 0 sends a new unique id over that collective.
fn connect(
    host: &mut dyn Collective,
    cx: &OpContext<'_>,
    nccl: Option<&Arc<Nccl>>,
    place: &OperationDevice,
) -> Result<Communicator> {
    let nccl = nccl.ok_or_else(|| Error::other("NCCL was chosen, but this rank does not have it"))?;
    let lane_device = place.lane_device();
    let context = lane_device.context();
    let mut id = if host.rank() == 0 { unique_id(nccl, context)? } else { [0; UNIQUE_ID_BYTES] };
    host.run(cx, Verb::Broadcast { root: 0 }, Io::in_place(&mut id))?;
    Communicator::new(nccl, context, cx, (host.rank(), host.size()), id)
}

/// Lets all ranks compare their calls over the host's collective, because NCCL does not notice calls that differ. This
/// happens for the first call of each bucket after its registration, for the first bucket of each step, and on request.
fn compare(
    inner: &mut dyn Collective,
    compared: &mut Compared,
    cx: &OpContext<'_>,
    place: &OperationDevice,
) -> Result<()> {
    let is_due = place.registration().is_some_and(|number| compared.is_due(number));
    if !place.check && !is_due {
        return Ok(());
    }
    let mut all = vec![0; inner.size() * CHECK];
    inner.run(cx, Verb::AllGather, Io::split(&[0; CHECK], &mut all))
}

/// Returns this rank's record, and its NCCL if usable. NCCL is searched for only if the caller requests it.
fn candidate(place: &OperationDevice) -> (Candidate, Option<Arc<Nccl>>) {
    let lane_device = place.lane_device();
    let context = lane_device.context();
    let plain = Candidate { requested: place.requested, uuid: context.uuid(), ..Candidate::default() };
    let source = match (place.requested, context.nccl()) {
        (Requested::Staged, _) => return (plain, None),
        (Requested::Auto | Requested::Nccl, None) => {
            return (Candidate { reason: "no path of libnccl was given".to_owned(), ..plain }, None);
        }
        (Requested::Auto | Requested::Nccl, Some(source)) => source,
    };
    let found = (source.load)().map_err(|error| error.to_string());
    match found.and_then(|nccl| nccl.served().map(|version| (nccl, version))) {
        Ok((nccl, version)) => (Candidate { nccl: version, several: source.several, ..plain }, Some(nccl)),
        Err(reason) => (Candidate { reason, ..plain }, None),
    }
}
