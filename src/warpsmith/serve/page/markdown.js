// Markdown to DOM nodes, made for text that is still growing: a block is only built again when its source has changed.
// Nodes are created one by one and text is set as text, so nothing a model writes can become markup.

export function renderInto(container, source) {
  const blocks = split(source);
  blocks.forEach((block, i) => {
    const old = container.children[i];
    if (old && old.source === block.source && old.kind === block.kind) return;
    const node = build(block);
    node.source = block.source;
    node.kind = block.kind;
    if (old) old.replaceWith(node); else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([\w+#.-]*).*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Blocks of a text: {kind, source, ...}
function split(source) {
  const lines = source.split("\n"), blocks = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i], start = i;
    const fence = FENCE.exec(line);
    let block;
    if (!line.trim()) { i++; continue; }
    if (fence) {
      const end = new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},}\\s*$`);
      for (i++; i < lines.length && !end.test(lines[i]); i++);
      block = { kind: "code", language: fence[3], text: lines.slice(start + 1, i).join("\n") };
      i++;
    } else if (HEADING.test(line)) {
      const [, marks, text] = HEADING.exec(line);
      block = { kind: "heading", level: marks.length, text };
      i++;
    } else if (RULE.test(line)) {
      block = { kind: "rule" };
      i++;
    } else if (/^\s*>/.test(line)) {
      for (; i < lines.length && /^\s*>/.test(lines[i]); i++);
      block = { kind: "quote", text: lines.slice(start, i).map((l) => l.replace(/^\s*> ?/, "")).join("\n") };
    } else if (line.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1])) {
      for (i += 2; i < lines.length && lines[i].includes("|"); i++);
      block = { kind: "table", rows: [line, ...lines.slice(start + 2, i)] };
    } else if (ITEM.test(line)) {
      for (; i < lines.length && (ITEM.test(lines[i]) || /^\s+\S/.test(lines[i]) || (!lines[i].trim() && i + 1 < lines.length && (ITEM.test(lines[i + 1]) || /^\s+\S/.test(lines[i + 1])))); i++);
      block = { kind: "list", lines: lines.slice(start, i) };
    } else {
      for (; i < lines.length && lines[i].trim() && !(i > start && opens(lines[i])); i++);
      block = { kind: "paragraph", text: lines.slice(start, i).join("\n") };
    }
    block.source = lines.slice(start, i).join("\n");
    blocks.push(block);
  }
  return blocks;
}

const opens = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^\s*>/.test(line);

function build(block) {
  switch (block.kind) {
    case "code": return code(block);
    case "heading": return inline(element(`h${Math.min(block.level, 4)}`), block.text);
    case "rule": return element("hr");
    case "quote": { const node = element("blockquote"); renderInto(node, block.text); return node; }
    case "table": return table(block.rows);
    case "list": return list(block.lines);
    default: return inline(element("p"), block.text);
  }
}

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function code({ language, text }) {
  const figure = element("figure"), caption = element("figcaption"), pre = element("pre"), copy = element("button");
  copy.type = "button";
  copy.dataset.copy = "code";
  copy.append(icon("copy"), "Copy");
  caption.append(element("span", "", language || "text"), copy);
  const inner = element("code");
  highlight(inner, text, language);
  pre.append(inner);
  pre.tabIndex = 0; // long lines can be scrolled to by keyboard
  figure.append(caption, pre);
  return figure;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

function table(rows) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const frame = element("div", "table"), node = element("table"), head = element("thead"), body = element("tbody");
  rows.forEach((row, i) => {
    const line = element("tr");
    for (const cell of cells(row)) line.append(inline(element(i ? "td" : "th"), cell));
    (i ? body : head).append(line);
  });
  node.append(head, body);
  frame.append(node);
  return frame;
}

// Items by indentation; a deeper one belongs to the last shallower one.
function list(lines) {
  const first = ITEM.exec(lines[0]), indent = first[1].length, ordered = /\d/.test(first[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(first[2], 10);
  let item = null, own = [], inner = [];
  const close = () => {
    if (!item) return;
    inline(item, own.join("\n").trim());
    while (inner.length && !inner[0].trim()) inner.shift();
    if (inner.length) {
      const lead = /^\s*/.exec(inner[0])[0].length, holder = element("div");
      renderInto(holder, inner.map((line) => line.slice(Math.min(lead, /^\s*/.exec(line)[0].length))).join("\n"));
      item.append(...holder.childNodes);
    }
    node.append(item);
  };
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent) {
      close();
      item = element("li");
      own = [match[3]];
      inner = [];
    } else if (match || inner.length || FENCE.test(line.trim())) inner.push(line);
    else own.push(line.trim());
  }
  close();
  return node;
}

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|__([^_]+)__|\*([^*\s][^*]*)\*|(?<![\w])_([^_\s][^_]*)_(?![\w])|~~([^~]+)~~|\[([^\]]+)\]\(([^)\s]+)[^)]*\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+.!~|>-])/;

function inline(node, text) {
  while (text) {
    const match = INLINE.exec(text);
    if (!match) break;
    plain(node, text.slice(0, match.index));
    text = text.slice(match.index + match[0].length);
    const [, , mono, strong, strong2, em, em2, gone, label, target, url, escaped] = match;
    if (mono !== undefined) node.append(element("code", "", mono.trim() || mono));
    else if (strong ?? strong2) node.append(inline(element("strong"), strong ?? strong2));
    else if (em ?? em2) node.append(inline(element("em"), em ?? em2));
    else if (gone) node.append(inline(element("del"), gone));
    else if (label) node.append(link(target, label));
    else if (url) node.append(link(url, url));
    else plain(node, escaped);
  }
  plain(node, text);
  return node;
}

// Only addresses of the web and of mail are links; anything else is shown as it is.
function link(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return document.createTextNode(`[${label}](${target})`);
  const node = element("a", "", label);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function plain(node, text) {
  text.split(/ {2,}\n|\\\n/).forEach((line, i) => {
    if (i) node.append(element("br"));
    if (line) node.append(line);
  });
}

const WORDS = new Set(("abstract and as assert async await bool boolean break case catch char class const continue def default del do double " +
  "elif else enum except export extends false finally float fn for from func function global go if impl import in int interface is lambda " +
  "let long match mod module mut namespace new nil none None nonlocal not null or package pass private protected pub public raise return " +
  "self Self static str string struct super switch template this throw trait true True False try type typename typeof undefined union " +
  "unsafe use using var void where while with yield select insert update delete create table end then fi done echo").split(" "));
const HASH = new Set(["python", "py", "sh", "bash", "shell", "yaml", "yml", "toml", "ruby", "rb", "r", "make", "dockerfile", ""]);
const LEX = /("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?)|(\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)|#[^\n]*|--[^\n]*)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

// Enough colour to read code by: strings, comments, numbers and the words that most languages share.
function highlight(node, text, language) {
  language = language.toLowerCase();
  if (["text", "txt", "markdown", "md", "diff"].includes(language) || text.length > 50000) { node.textContent = text; return; }
  let last = 0;
  for (const match of text.matchAll(LEX)) {
    const [whole, string, comment, number, word] = match;
    if (comment && ((comment[0] === "#" && !HASH.has(language)) || (comment[0] === "-" && language !== "sql") || (comment[0] === "/" && HASH.has(language) && language))) continue;
    const kind = string ? "s" : comment ? "c" : number ? "n" : WORDS.has(word) ? "k" : "";
    if (!kind) continue;
    node.append(text.slice(last, match.index), element("span", `tok-${kind}`, whole));
    last = match.index + whole.length;
  }
  node.append(text.slice(last));
}
