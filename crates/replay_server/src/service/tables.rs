//! The tables of a server: requests that create, empty and drop them, whose time grows with the table's capacity, so that connections run them
//! on another thread.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::Mutex;

use replay_core::memory::Memory;
use replay_core::schema::TableConfig;
use replay_link::carry_out;
use replay_link::error::{Error, Result};
use replay_wire::{ReplyBody, RequestBody};

/// The tables of a server's memory.
pub struct Tables {
    memory: Arc<Memory>,
    /// Names of the tables in the server's own configuration.
    configured: HashSet<String>,
    /// One request at a time: more threads would only wait for each other.
    pub one_at_a_time: Mutex<()>,
}

impl Tables {
    /// Makes the configured tables.
    ///
    /// # Errors
    /// Errors of [`Memory::create_table`].
    pub fn new(memory: Arc<Memory>, configured: &[TableConfig]) -> Result<Arc<Self>> {
        for table in configured {
            memory.create_table(table)?;
        }
        Ok(Arc::new(Tables {
            memory,
            configured: configured.iter().map(|table| table.name.clone()).collect(),
            one_at_a_time: Mutex::default(),
        }))
    }

    /// Answers a request that makes, empties or removes a table.
    ///
    /// # Errors
    /// The error to answer the request with.
    pub fn answer(&self, request: &RequestBody) -> Result<ReplyBody> {
        match request {
            RequestBody::CreateTable(config) => self.create(config)?,
            RequestBody::EmptyTable(_) => {
                carry_out(&self.memory, request)?;
                return_freed_memory();
            }
            RequestBody::DropTable(name) => {
                self.remove(name)?;
                return_freed_memory();
            }
            _ => return Err(Error::Internal("this request is not about a table".into())),
        }
        Ok(ReplyBody::Done)
    }

    /// The answer to `CreateTable` if the table exists, else `None`.
    pub fn find(&self, config: &TableConfig) -> Option<Result<ReplyBody>> {
        let table = self.memory.table(&config.name).ok()?;
        Some(table.config().check_same(config).map(|()| ReplyBody::Done).map_err(Error::from))
    }

    fn create(&self, config: &TableConfig) -> Result<()> {
        let known = self.memory.table(&config.name).is_ok();
        self.memory.create_table(config).map_err(|error| match error {
            replay_core::Error::TableDiffers { table, difference } if self.configured.contains(&table) => {
                let difference = format!("{difference} (the table is in the server's configuration)");
                replay_core::Error::TableDiffers { table, difference }
            }
            error => error,
        })?;
        if known {
            tracing::info!(table = config.name, "the table exists already: all programs that use it share its steps");
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        if self.configured.contains(name) {
            let table = self.memory.table(name)?;
            if table.has_failed() {
                // Nothing else ends a failed table, and the server's snapshots wait for its end.
                self.memory.drop_table(name)?;
                self.memory.create_table(table.config())?;
                return Ok(());
            }
            return Err(Error::Config(format!(
                "table {name:?} is in the server's configuration and cannot be dropped: empty it instead (innet-replay empty, or Replay.empty_table)"
            )));
        }
        Ok(self.memory.drop_table(name)?)
    }
}

/// Returns freed memory to the system. glibc keeps up to 64 MiB per thread: without this call, a server exceeded `max_bytes` by half after
/// dropping tables of some size.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim takes the allocator's own locks, may be called from any thread, and moves no allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}
