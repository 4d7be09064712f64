//! How the ranks of a host come to share memory, all together over the host's collective: each makes windows and events, tells their names,
//! and opens those of the others. What prevents it on one rank is known to all of them, and is a reason for another collective.

use std::sync::Arc;

use bagua_core::collective::{Collective, Io, OpContext, Verb};
use bagua_core::error::{Error, Result};
use bagua_core::health::GroupHealth;
use bagua_core::types::{DType, ReduceOp};
use bagua_core::wait::lock;

use super::book::Book;
use super::rank::{Ipc, Running};
use super::shared::{Peer, Shared};
use super::told::tell;
use super::windows::{EVENTS, Names, Opened, Signals, TURNS, Window};
use crate::api::IpcHandle;
use crate::context::Context;
use crate::leaders::Leaders;
use crate::reduction::Reduction;
use crate::stage::Stage;
use crate::stream::Stream;

/// Bytes that windows may have. They begin small, and larger ones come beside them. Not measured: no GPU could be had. The driver maps
/// memory for other processes in pieces of 2 MiB, which two windows fill.
const SIZES: [usize; 4] = [1 << 20, 8 << 20, 64 << 20, 256 << 20];

/// How many of the sizes ranks with devices of their own use. Ranks that share a device have it by turns, and larger windows mean fewer.
const SIZES_OF_DEVICES: usize = 3;

/// Where the ranks of a group are, and on which devices.
pub(crate) struct Ranks<'a> {
    /// This rank.
    pub(crate) own: usize,
    /// The ranks of each host.
    pub(crate) hosts: &'a [Vec<usize>],
    /// Identifier of each rank's device, where the driver tells it.
    pub(crate) uuids: Vec<Option<[u8; 16]>>,
}

impl Ipc {
    /// All ranks of a group come to share memory inside their hosts. `Err` in the result is the reason why they cannot, the same on all ranks,
    /// after which nothing is left of it. With `kernels`, a rank on which kernels cannot be had is such a reason.
    ///
    /// # Errors
    /// Those of the host's collective.
    pub(crate) fn connect(
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        stage: &Stage,
        ranks: &Ranks<'_>,
        kernels: bool,
    ) -> Result<std::result::Result<Ipc, String>> {
        let prepared = Ipc::prepare(stage.context(), cx.health, ranks, kernels).map_err(|error| error.to_string());
        let (mut ipc, own) = match prepared {
            Ok((ipc, own)) => (Some(ipc), Ok(own)),
            Err(reason) => (None, Err(reason)),
        };
        let names = match (tell(inner, cx, &own)?, &ipc) {
            (Ok(names), Some(_)) => names,
            (Err(reason), _) => return Ok(Err(reason)),
            (Ok(_), None) => return Err(Error::other("a rank without windows did not say so")),
        };
        let Some(made) = &mut ipc else { return Err(Error::other("a rank has no windows")) };
        // Others open the first rank's file by its number, which it has until all have told that they did.
        let by_number = made.shared.book.take();
        let opened = made.open_peers(&names).map_err(|error| error.to_string());
        let told = tell(inner, cx, &opened.and(own))?;
        if let Err(reason) = told {
            made.close_peers();
            inner.run(cx, Verb::Barrier, Io::none())?;
            return Ok(Err(reason));
        }
        drop(by_number);
        stage.set_windows(made.bytes());
        Ok(ipc.ok_or(String::new()))
    }

    /// This rank's windows and events, and their names.
    fn prepare(context: &Arc<Context>, health: &GroupHealth, ranks: &Ranks<'_>, kernels: bool) -> Result<(Ipc, Names)> {
        let Ranks { own, hosts, uuids } = ranks;
        let leaders = Leaders::new(hosts, *own)?;
        let here = hosts[leaders.host()].clone();
        let me = here.iter().position(|rank| rank == own).expect("found above");
        for rank in &here {
            if let Some(uuid) = uuids[*rank]
                && context.reaches(uuid)? == Some(false)
            {
                let text = format!("{context:?} does not reach the memory of the device of rank {rank}");
                return Err(Error::Unavailable(text));
            }
        }
        if kernels {
            Reduction::new(context, DType::F32, ReduceOp::Sum, here.len())?;
        }
        let (filling, taking) = (Stream::new(context)?, Stream::new(context)?);
        let signals = Signals::new(context)?;
        let mut windows = Vec::new();
        if ranks.uuids.len() > 1 {
            windows.push(Window::new(context, SIZES[0])?);
        }
        let mut names = Names {
            process: std::process::id(),
            book: -1,
            memory: IpcHandle([0; 64]),
            events: [IpcHandle([0; 64]); EVENTS],
        };
        let mut book = None;
        if let (Some(window), 2..) = (windows.first(), here.len()) {
            (names.memory, names.events) = (window.name()?, signals.names()?);
            if me == 0 {
                let made = Book::new()?;
                names.book = made.number();
                book = Some(made);
            }
        }
        let running: Arc<Running> = Arc::default();
        let late = Arc::clone(&running);
        let lost = health.subscribe(move |cause| {
            if matches!(cause, Error::PeerLost { .. }) {
                for (event, failure) in lock(&late).iter() {
                    if matches!(event.is_reached(), Ok(false)) {
                        // The first one holds.
                        let _ = failure.set(cause.clone());
                    }
                }
            }
        });
        let twin = |(at, rank): (usize, &usize)| here[..at].iter().any(|other| uuids[*other] == uuids[*rank]);
        let ipc = Ipc {
            one_device: here.iter().enumerate().any(twin),
            context: Arc::clone(context),
            leaders,
            filling,
            taking,
            shared: Shared { me, book, signals, windows, peers: here.iter().map(|_| None).collect(), full: false },
            here,
            turn: 0,
            running,
            _lost: lost,
            over: false,
        };
        Ok((ipc, names))
    }

    /// Opens what the others share. `names` are those of all ranks of the group.
    fn open_peers(&mut self, names: &[Names]) -> Result<()> {
        if self.ranks() == 1 {
            return Ok(());
        }
        let first = &names[self.here[0]];
        let book = Book::open(first.process, first.book)?;
        book.enter()?;
        self.shared.book = Some(book);
        for (index, rank) in self.here.iter().enumerate().filter(|(index, _)| *index != self.shared.me) {
            let signals = Signals::open(&self.context, &names[*rank].events)?;
            let windows = vec![Opened::new(&self.context, names[*rank].memory)?];
            self.shared.peers[index] = Some(Peer { signals, windows });
        }
        Ok(())
    }

    /// Closes it before anything was done with it.
    fn close_peers(&mut self) {
        self.shared.peers.iter_mut().for_each(|peer| drop(peer.take()));
        if let Some(book) = self.shared.book.take() {
            book.leave();
        }
    }

    /// Bytes of this rank's windows, of all sizes.
    pub(super) fn bytes(&self) -> usize {
        self.shared.windows.iter().map(|window| TURNS * window.bytes()).sum()
    }

    /// Bytes that a window has for an operation of all ranks that needs so many: larger windows are made where it needs more and they can be
    /// had. All ranks get the same.
    pub(super) fn room_for(
        &mut self,
        inner: &mut dyn Collective,
        cx: &OpContext<'_>,
        stage: &Stage,
        bytes: usize,
    ) -> Result<usize> {
        let sizes = if self.one_device { &SIZES[..] } else { &SIZES[..SIZES_OF_DEVICES] };
        let wanted = sizes.iter().copied().find(|size| *size >= bytes).unwrap_or(sizes[sizes.len() - 1]);
        if wanted <= self.shared.bytes() || self.shared.full {
            return Ok(self.shared.bytes());
        }
        let made = Window::new(&self.context, wanted).and_then(|window| Ok((window.name()?, window)));
        let (own, window) = match made {
            Ok((memory, window)) => {
                let events = [IpcHandle([0; 64]); EVENTS];
                (Ok(Names { process: std::process::id(), book: -1, memory, events }), Some(window))
            }
            Err(error) => (Err(error.to_string()), None),
        };
        let (Ok(names), Some(window)) = (tell(inner, cx, &own)?, window) else {
            self.shared.full = true;
            return Ok(self.shared.bytes());
        };
        let open = |rank: &usize| match *rank == self.here[self.shared.me] {
            true => Ok(None),
            false => Opened::new(&self.context, names[*rank].memory).map(Some),
        };
        let opened: Result<Vec<_>> = self.here.iter().map(open).collect();
        let failed = opened.as_ref().err().map(|error| error.to_string());
        let told = tell(inner, cx, &failed.map_or(own, Err))?;
        let opened = opened.ok().filter(|_| told.is_ok());
        let Some(opened) = opened else {
            // All ranks have closed what they opened.
            inner.run(cx, Verb::Barrier, Io::none())?;
            self.shared.full = true;
            return Ok(self.shared.bytes());
        };
        self.shared.windows.push(window);
        for (peer, opened) in self.shared.peers.iter_mut().zip(opened) {
            if let (Some(peer), Some(opened)) = (peer, opened) {
                peer.windows.push(opened);
            }
        }
        stage.set_windows(self.bytes());
        Ok(self.shared.bytes())
    }
}
