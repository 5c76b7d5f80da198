// The page: views above, tables below, the tree and details beside them.

const content = JSON.parse($("data").textContent);
const model = new Model(content);

function tabs(bar, panel, views, show, first = 0) {
  let current = -1;
  const go = (place) => {
    if (place === current) return;
    if (current >= 0 && views[current].hide) views[current].hide();
    current = place;
    [...bar.children].forEach((tab, one) => {
      tab.setAttribute("aria-selected", String(one === place));
      tab.tabIndex = one === place ? 0 : -1;
    });
    panel.setAttribute("aria-label", views[place].title);
    show(views[place]);
  };
  bar.replaceChildren(...views.map((view, place) => h("button", { type: "button", role: "tab", "aria-selected": "false", "aria-controls": panel.id, title: view.hint, onclick: () => go(place) }, view.title)));
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const place = (current + step + views.length) % views.length;
    go(place);
    bar.children[place].focus();
  });
  if (views.length) go(first);
}

function makeTables() {
  let shown = null;
  const tell = (rows, all) => {
    $("rows").textContent = rows === all ? plural(all, "row") : `${grouped(rows)} of ${plural(all, "row")}`;
  };
  const ofOps = {
    title: "Ops", hint: "Each op, with what every file says of it",
    table: () => ({
      label: "Ops", columns: model.columns.map((column) => ({ ...column, from: column.table && column.table.name })), rows: model.size,
      chosen: (row) => !model.matches || model.matches[row] === 1,
      selected: () => new Set(model.selectedOp < 0 ? [] : [model.selectedOp]),
      pick: (row) => model.selectOp(row), tell,
    }),
  };
  const own = model.tables.filter((table) => !table.joined).map((table) => {
    let picked = -1;
    return {
      schema: table.schema,
      title: table.title.length <= 22 ? table.title : table.schema.replace("amanda.", ""), hint: `${table.title}, ${table.name}`,
      table: () => ({
        label: table.title, rows: table.rows.length,
        columns: table.columns.map((column, place) => ({ ...column, path: column.name === "module" || column.name === "source", values: table.rows.map((row) => model.value(row[place], column)) }))
          .map((column) => ({ ...column, large: isLarge(column.values, column) })),
        chosen: (row) => !model.matches || !table.ops || table.ops[row].some((op) => model.matches[op]),
        selected: () => {
          if (picked >= 0 && (!table.ops || !table.ops[picked].length || table.ops[picked].includes(model.selectedOp))) return new Set([picked]);
          const op = model.selectedOp;
          return new Set(op < 0 || !table.ops ? [] : table.ops.flatMap((about, row) => (about.includes(op) ? [row] : [])));
        },
        pick: (row) => {
          picked = row;
          if (table.ops) model.selectOp(table.ops[row].length ? table.ops[row][0] : -1);
          if (shown) shown.reveal();
        },
        tell,
      }),
    };
  });
  const views = [...(model.size ? [ofOps] : []), ...own];
  const telling = content.graph || model.columns.some((column) => column.table);
  const first = Math.max(views.findIndex((view) => view.schema === "amanda.diff"), model.size && own.length && !telling ? 1 : 0);
  tabs($("tables"), $("table"), views, (view) => {
    if (shown) shown.remove();
    shown = new DataTable($("table"), view.table());
  }, first);
  model.on("search", () => {
    if (!shown) return;
    shown.list();
    shown.reveal();
  });
  model.on("selection", () => { if (shown) shown.reveal(); });
  return views.length;
}

function makeSearch() {
  const query = $("query");
  const say = () => {
    $("found").textContent = model.matches ? `${grouped(model.found.length)} of ${grouped(model.size)}` : "";
  };
  let due = 0;
  const search = () => { clearTimeout(due); due = 0; model.search(query.value); };
  query.addEventListener("input", () => { clearTimeout(due); due = setTimeout(search, model.size > 3000 ? 120 : 0); });
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      if (due) search();
      model.nextFound(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      query.value = "";
      search();
      query.blur();
    } else if (event.key === "ArrowDown") {
      $("tree").focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  model.on("search", say);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      query.focus();
      query.select();
      event.preventDefault();
    } else if (event.key === "Escape" && !typing) {
      model.select(null);
    }
  });
}

function makeMeasures() {
  const measures = model.measures;
  $("measure").replaceChildren(...measures.map((column) => h("option", { value: column.name }, column.name)));
  $("measures").hidden = measures.length < 2;
  $("measure").addEventListener("change", (event) => model.setMeasure(event.target.value));
}

// Dragged, or moved by the arrow keys.
function makeSplits() {
  for (const split of document.querySelectorAll(".split")) {
    const pane = $(split.dataset.of);
    const upright = split.getAttribute("aria-orientation") === "vertical";
    const grows = split.dataset.side === "before" ? 1 : -1;
    const resize = (change) => {
      const box = pane.getBoundingClientRect();
      const room = split.parentElement.getBoundingClientRect();
      const most = (upright ? room.width : room.height) - 120;
      const size = clamp((upright ? box.width : box.height) + grows * change, 60, most);
      if (change) pane.style.flexBasis = `${size}px`;
      split.setAttribute("aria-valuenow", Math.round((100 * size) / Math.max(1, upright ? room.width : room.height)));
    };
    resize(0);
    split.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      split.setPointerCapture(event.pointerId);
      let last = upright ? event.clientX : event.clientY;
      const move = (moved) => {
        const now = upright ? moved.clientX : moved.clientY;
        resize(now - last);
        last = now;
      };
      split.addEventListener("pointermove", move);
      split.addEventListener("lostpointercapture", () => split.removeEventListener("pointermove", move), { once: true });
    });
    split.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: upright ? -16 : 0, ArrowRight: upright ? 16 : 0, ArrowUp: upright ? 0 : -16, ArrowDown: upright ? 0 : 16 }[event.key];
      if (!step) return;
      resize(step);
      event.preventDefault();
    });
  }
}

function makeTheme() {
  const button = $("theme");
  const order = ["Auto", "Light", "Dark"];
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(button.textContent) + 1) % order.length];
    button.textContent = next;
    button.setAttribute("aria-label", `Colours: ${next}`);
    if (next === "Auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next.toLowerCase();
    model.tell("search");
  });
}

function showPage() {
  $("title").textContent = content.title;
  document.body.classList.toggle("no-ops", !model.size);
  makeMeasures();
  makeSearch();
  makeSplits();
  makeTheme();
  if (model.size) new Tree(model, $("tree"));
  new Details(model, $("facts"));
  $("fold-all").addEventListener("click", () => model.foldAll(false));
  $("unfold-all").addEventListener("click", () => model.foldAll(true));
  $("overview").addEventListener("click", () => model.select(null));
  const views = [];
  if (model.edges.length || content.graph) views.push(new Graph(model, $("view"), $("tools")));
  for (const table of model.tables) if (table.schema === "amanda.diff") views.push(new DiffView(model, table, $("view"), $("tools")));
  document.body.classList.toggle("no-views", !views.length);
  const tables = makeTables();
  document.body.classList.toggle("no-tables", !tables);
  const diverged = views.findIndex((view) => view.firsts && view.firsts.length);
  if (diverged >= 0) views[diverged].pick(Math.min(...views[diverged].firsts.map(([, row]) => row)));
  tabs($("views"), $("view"), views, (view) => view.show(), Math.max(0, diverged));
  document.documentElement.dataset.ready = "yes";
}

try {
  showPage();
} catch (error) {
  document.body.prepend(h("p", { class: "failed", role: "alert" }, `This page cannot be shown: ${error.message}`));
  throw error;
}
