// Draws the charts of a page with plotly from the JSON in #data. No text of the data becomes HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = { light: ["#2563c9", "#d9700a", "#17865a", "#a23fae", "#a98600", "#0c8ba0", "#cf3a46", "#6d5f4d"],
                   dark: ["#7db0ff", "#ffab5c", "#5fd39b", "#dd8fe6", "#e3c24a", "#5fd0e0", "#ff8f97", "#c3b39c"] };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 760px)");
  const controls = { x: byId("x-axis"), smoothing: byId("smoothing"), log: byId("log"), raw: byId("raw") };
  const nonce = document.currentScript.nonce;
  const plots = [];

  function byId(name) { return document.getElementById(name); }
  function plain(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }

  // The value of a rising curve between its points; steps outside it are held at its ends.
  function lookUp(curve, x) {
    const { x: xs, y: ys } = curve;
    let low = 0, high = xs.length - 1;
    if (x <= xs[0]) return xs[0] > 0 ? ys[0] * x / xs[0] : ys[0];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low] || 1);
  }

  const X_AXES = {
    step: { title: "step" },
    tokens: { title: data.unit, curve: "tokens" },
    seconds: { title: "training time", curve: "seconds", unit: "time" },
  };
  function timeScale() {  // one unit for the page: that of the longest run
    const longest = Math.max(0, ...data.runs.map(run => run.scales.seconds ? run.scales.seconds.y.at(-1) : 0));
    return longest > 172800 ? [1 / 86400, "days"] : longest > 7200 ? [1 / 3600, "hours"] : longest > 300 ? [1 / 60, "minutes"] : [1, "seconds"];
  }
  function xValues(steps, run) {
    const axis = X_AXES[controls.x.value], curve = axis.curve && run.scales[axis.curve];
    if (!axis.curve) return steps;
    if (!curve) return steps.map(() => null);
    const scale = axis.unit === "time" ? timeScale()[0] : 1;
    return steps.map(step => lookUp(curve, step) * scale);
  }

  // Exponential averages of the values before and after each, so that the curve does not lag behind; without the bias of
  // the first values (as in Adam).
  function smooth(values, amount) {
    if (amount <= 0) return values;
    const after = average([...values].reverse(), amount).reverse();
    return average(values, amount).map((before, place) => (before + after[place]) / 2);
  }
  function average(values, amount) {
    let sum = 0, weight = 0;
    return values.map(value => { sum = amount * sum + (1 - amount) * value; weight = amount * weight + 1 - amount; return sum / weight; });
  }

  function traces(chart) {
    const palette = COLORS[dark.matches ? "dark" : "light"], amount = chart.smooths ? parseFloat(controls.smoothing.value) : 0, several = data.runs.length > 1;
    return chart.series.flatMap(series => {
      const run = data.runs[series.run], x = xValues(series.x, run);
      const color = palette[(several ? run.color : series.style) % palette.length];
      const dash = several && series.style ? ["solid", "dash", "dot"][series.style % 3] : "solid";
      const base = { type: "scatter", name: plain(series.name || chart.title), legendgroup: `${series.run}/${series.style}`, showlegend: !(several && series.style), customdata: series.x,
        hovertemplate: `%{y:${chart.share ? ".1%" : ".5~g"}}${controls.x.value === "step" ? "" : " (step %{customdata})"}` };
      if (series.marks) return [{ ...base, x, y: series.y, mode: "lines+markers", line: { color, dash, width: 1.5 }, marker: { color, size: 6 } }];
      const means = series.means || series, isSmooth = amount > 0 || series.means;
      const raw = { ...base, x, y: series.y, mode: "lines", line: { color, dash, width: isSmooth ? 1 : 1.5 }, opacity: isSmooth ? 0.42 : 1, showlegend: base.showlegend && !isSmooth, hoverinfo: isSmooth ? "skip" : undefined };
      if (isSmooth) delete raw.hovertemplate;
      const line = { ...base, x: xValues(means.x, run), y: smooth(means.y, amount), customdata: means.x, mode: "lines", line: { color, dash, width: 2 } };
      return isSmooth ? [...(controls.raw.checked ? [raw] : []), line] : [raw];
    });
  }

  function layout(chart) {
    const ink = dark.matches ? "#c3cad3" : "#444c56", grid = dark.matches ? "#2b333d" : "#e7eaee", axis = X_AXES[controls.x.value];
    const xTitle = axis.unit === "time" ? `${axis.title} (${timeScale()[1]})` : axis.title;
    const isLog = controls.log.checked && chart.logs, isLoss = chart === data.charts[0];
    const lines = (steps, color) => !isLoss || data.runs.length > 1 ? [] : xValues(steps, data.runs[0]).map(x => (
      { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1, dash: "dot" } }));
    return {
      margin: { l: 52, r: 10, t: 8, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      hovermode: "x unified", dragmode: narrow.matches ? false : "zoom", showlegend: chart.series.length > 1, uirevision: controls.x.value + isLog,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", itemsizing: "constant" },
      hoverlabel: { bgcolor: dark.matches ? "#242b34" : "#ffffff", font: { color: dark.matches ? "#e3e7ec" : "#1b1f24" } },
      xaxis: { rangemode: "tozero", title: { text: xTitle, standoff: 6 }, gridcolor: grid, zeroline: false, linecolor: grid, automargin: false, nticks: narrow.matches ? 5 : 8, exponentformat: "SI" },
      yaxis: { gridcolor: grid, zeroline: false, linecolor: grid, type: isLog ? "log" : "linear", rangemode: chart.zero && !isLog ? "tozero" : chart.series.every(series => series.y.every(value => !(value < 0))) ? "nonnegative" : "normal", tickformat: chart.share ? "~p" : undefined, exponentformat: "SI", nticks: 7,
        dtick: isLog && spansDecades(chart) ? 1 : undefined, minexponent: 4 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: ink, orientation: "h" },
      shapes: [...lines(data.resumed || [], ink), ...lines(data.skipped || [], dark.matches ? "#ff8a80" : "#b3261e")],
    };
  }
  function spansDecades(chart) {
    const values = chart.series.flatMap(series => series.y).filter(value => value > 0);
    const [low, high] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
    return high / low > 100;
  }

  function draw() {
    for (const [chart, place] of plots) {
      Plotly.react(place, traces(chart), layout(chart), { responsive: true, displaylogo: false, displayModeBar: !narrow.matches,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { filename: chart.id, scale: 2 } });
    }
    const shown = byId("smoothing-value");
    if (shown) shown.textContent = parseFloat(controls.smoothing.value).toFixed(2);
  }

  // Plotly lies in the page as gzip in base64. The script that it becomes runs because it bears the page's nonce, too.
  async function openLibrary() {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old; Chrome 80, Firefox 113 and Safari 16.4 can");
    const packed = Uint8Array.from(atob(byId("library").textContent), each => each.charCodeAt(0));
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  }

  function start() {
    const grid = byId("charts");
    data.charts.forEach((chart, number) => {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption"), note = document.createElement("small"), place = document.createElement("div");
      figure.id = `chart-${chart.id}`;
      if (number === 0) figure.className = "wide";
      caption.textContent = chart.title;
      const widths = Math.max(1, ...chart.series.map(series => series.width)), lost = chart.series.reduce((sum, series) => sum + series.not_finite, 0);
      const others = data.runs.length > 1 ? [...new Set(chart.series.filter(series => series.style === 1).map(series => series.label))] : [];
      note.textContent = [chart.unit, ...others.map(label => `dashed: ${label}`), widths > 1 ? `extremes and mean of each ${widths} steps` : "", lost ? `${lost} values not finite` : ""].filter(Boolean).join(" · ");
      place.className = "plot";
      caption.append(note);
      figure.append(caption, place);
      grid.append(figure);
      plots.push([chart, place]);
    });
    openLibrary().then(show, complain);
  }
  function show() {
    for (const control of Object.values(controls)) control.addEventListener("input", draw);
    dark.addEventListener("change", draw);
    narrow.addEventListener("change", draw);
    draw();
    document.documentElement.dataset.drawn = String(plots.length);
  }
  function complain(error) {
    byId("not-drawn").textContent = `The curves cannot be drawn: ${error.message}.`;
    byId("not-drawn").hidden = false;
  }
  start();
})();
