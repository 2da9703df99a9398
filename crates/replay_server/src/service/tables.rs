//! The tables of a server: requests that create, empty and drop them, whose time grows with the table's capacity, so that connections run them
//! on another thread; and the tables of a connection. Its first request about a table names it; later ones have the table's number.
//!
//! # Invariant
//!
//! A number always means the same table: iterators, writers and waiting calls end with their table, also if another gets its name.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use tokio::sync::Mutex;

use base::notation::shortened;
use replay_core::memory::Memory;
use replay_core::schema::TableConfig;
use replay_core::table::Table;
use replay_link::carry_out;
use replay_link::error::{Error, Result};
use replay_wire::{MAX_NUMBERED_TABLES, ReplyBody, Request, RequestBody};

/// Most bytes of a name that is kept; the longest name of a table is shorter.
const KEPT: usize = 160;

/// A connection's tables, in the order of their numbers.
#[derive(Default)]
pub struct NumberedTables(Vec<Rc<NumberedTable>>);

/// A table that a connection has named.
pub struct NumberedTable {
    name: String,
    /// The first table that had the name. Weak: a dropped table returns its memory at once.
    table: OnceCell<Weak<Table>>,
}

impl NumberedTables {
    /// The table of a request that has arrived, which may name it; `None` for a request that has none.
    ///
    /// # Errors
    /// [`Error::Protocol`](replay_wire::Error::Protocol) for a number that was not named, or not the next one.
    pub fn of(&mut self, request: &Request, memory: &Memory) -> Result<Option<Rc<NumberedTable>>> {
        let number = usize::from(request.table);
        if let Some(name) = &request.table_name {
            if number != self.0.len() + 1 || number > MAX_NUMBERED_TABLES {
                return Err(Error::protocol(format!(
                    "a request names table {number}, and the connection has numbered {} of at most {MAX_NUMBERED_TABLES}",
                    self.0.len()
                )));
            }
            self.0.push(Rc::new(NumberedTable::named(name)));
        }
        let Some(index) = number.checked_sub(1) else { return Ok(None) };
        let Some(table) = self.0.get(index) else {
            return Err(Error::protocol(format!("a request about table {number}, which has no name yet")));
        };
        // An error is the answer to the request.
        let _ = table.get(memory);
        Ok(Some(Rc::clone(table)))
    }
}

impl NumberedTable {
    /// The first table that has the name when it is asked for.
    pub fn named(name: &str) -> Self {
        NumberedTable { name: shortened(name, KEPT).into_owned(), table: OnceCell::new() }
    }

    /// The table that has the name now. For a request that goes to a writer, whose number is random: no other table has it.
    pub fn current(&self, memory: &Memory) -> Option<Arc<Table>> {
        memory.table(&self.name).ok()
    }

    /// The table.
    ///
    /// # Errors
    /// [`UnknownTable`](replay_core::Error::UnknownTable) when there has been none of the name yet, or it was dropped.
    pub fn get(&self, memory: &Memory) -> replay_core::error::Result<Arc<Table>> {
        if let Some(table) = self.table.get() {
            return table.upgrade().ok_or_else(|| Table::was_dropped(&self.name));
        }
        let table = memory.table(&self.name)?;
        self.table.get_or_init(|| Arc::downgrade(&table));
        Ok(table)
    }
}

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
